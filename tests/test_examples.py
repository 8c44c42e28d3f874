"""Tests of `mixedfp.examples` that need a module, a fresh process, or a patched download."""

import os
import random
import subprocess
import sys
import warnings

import inside
import numpy as np
import pytest
import torch
from fastai.vision.all import Learner, load_learner
from PIL import Image

from mixedfp.examples import Darknet, cifar10, photos, picture_dls
from mixedfp.testing import assert_same


def make_cifar10(root, classes=("airplane", "dog"), n=4):
    """Write a folder like CIFAR-10's, each picture of one colour; return it."""
    for split in ("train", "test"):
        for k, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            for i in range(n):
                colour = (60 * k, 40, 10 * i)
                Image.new("RGB", (32, 32), colour).save(root / split / name / f"{i:04}.png")
    return root


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """A machine without CIFAR-10: no variable, an empty data folder, and no network."""

    def no_network(url):
        raise OSError("no network")

    monkeypatch.delenv("CIFAR10_PATH", raising=False)
    inside.fastais_data(monkeypatch, tmp_path / "fastai", no_network)
    return tmp_path


def test_error_names_all_four_places(nowhere):
    with pytest.raises(FileNotFoundError) as e, pytest.warns(UserWarning, match="no such folder"):
        cifar10(nowhere / "typo")
    message = str(e.value)
    assert "typo" in message and "$CIFAR10_PATH: not given" in message
    assert "fastai's data folder: there is no such folder" in message
    assert "untar_data(URLs.CIFAR): OSError: no network" in message
    assert "photos()" in message
    assert isinstance(e.value.__cause__, OSError)


def test_download_is_not_tried_when_told_not_to(nowhere):
    with pytest.raises(FileNotFoundError, match="download=False"):
        cifar10(download=False)


def test_places_in_order(nowhere, monkeypatch):
    downloaded = make_cifar10(nowhere / "downloaded", n=2)
    inside.fastais_data(monkeypatch, nowhere / "fastai", lambda url: downloaded)
    sizes = [len(cifar10(bs=2).train_ds)]
    make_cifar10(nowhere / "fastai" / "data" / "cifar10", n=3)
    sizes.append(len(cifar10(bs=2).train_ds))
    monkeypatch.setenv("CIFAR10_PATH", str(make_cifar10(nowhere / "env", n=4)))
    sizes.append(len(cifar10(bs=2).train_ds))
    sizes.append(len(cifar10(make_cifar10(nowhere / "path", n=5), bs=2).train_ds))
    assert sizes == [4, 6, 8, 10]


def test_place_without_the_classes_is_passed_over(nowhere, monkeypatch):
    monkeypatch.setenv("CIFAR10_PATH", str(make_cifar10(nowhere / "two")))
    three = make_cifar10(nowhere / "fastai" / "data" / "cifar10", ("airplane", "dog", "frog"))
    with pytest.warns(UserWarning, match="has no train/frog, test/frog; trying the next place"):
        dls = cifar10(classes=("frog", "dog"), bs=2)
    assert three.is_dir() and list(dls.vocab) == ["frog", "dog"]
    assert dls.train.x[0, :, 0, 0].tolist() == [120, 40, 0]


def test_pictures_are_decoded_once(nowhere, monkeypatch):
    root = make_cifar10(nowhere / "once")
    first = cifar10(root, bs=2)
    monkeypatch.setattr(Image, "open", None)  # would raise
    second = cifar10(root, bs=2)
    assert second.train.x.data_ptr() == first.train.x.data_ptr()


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, "8", 1, 9])
def test_number_of_pictures_is_checked(nowhere, bad):
    root = make_cifar10(nowhere / "cifar")
    for name in ("n_train", "n_valid"):
        with pytest.raises(ValueError, match=name):
            cifar10(root, **{name: bad})


def test_training_and_validation_photos_share_no_pixel():
    seen = {split: set() for split in ("train", "valid")}
    for split, pixels in seen.items():
        for r, c in inside.photo_corners(split, 427, 640):
            assert 0 <= r <= 427 - 32 and 0 <= c <= 640 - 32
            pixels |= {(r + i, c + j) for i in range(32) for j in range(32)}
    assert seen["train"] and seen["valid"] and not seen["train"] & seen["valid"]


def test_flips_and_crops_follow_the_seed_alone():
    torch.manual_seed(0)
    a = [x for x, _ in photos(n_train=128, n_valid=2, device="cpu").train]
    torch.manual_seed(1)
    b = [x for x, _ in photos(n_train=128, n_valid=2, device="cpu").train]
    assert_same(a, b)
    other = next(iter(photos(n_train=128, n_valid=2, device="cpu", seed=1).train))[0]
    assert not torch.equal(a[0], other)


def test_validation_pictures_are_never_moved():
    dls = photos(n_train=8, n_valid=8, bs=8, device="cpu")
    first, second = (dls.valid.one_batch()[0] for _ in range(2))
    assert_same(first, second)
    mean = dls.valid.after_batch.fs[-1].mean
    std = dls.valid.after_batch.fs[-1].std
    expected = (dls.valid.x.float() / 255 - mean) / std
    torch.testing.assert_close(first.as_subclass(torch.Tensor), expected, rtol=1e-6, atol=1e-6)


def test_few_pictures_still_make_a_batch():
    assert len(photos(bs=64, n_train=8, n_valid=2, device="cpu").train) == 1


def test_export_and_load(tmp_path):
    dls = photos(n_train=64, n_valid=8, bs=16, device="cpu")
    learn = Learner(dls, Darknet([1, 1], num_classes=2, nf=4), path=tmp_path)
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
        before = learn.predict(dls.valid_ds.items[0].image)
        learn.export("learn.pkl")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fastai's, of pickles from strangers
            loaded = load_learner(tmp_path / "learn.pkl")
        with loaded.no_bar():
            after = loaded.predict(dls.valid_ds.items[0].image)
    assert after[0] == before[0]
    assert_same(after[2], before[2])
    assert loaded.dls.train.x is None  # the pictures are not in the file


def test_the_same_pictures_in_every_process():
    """In one that has another hash seed, and has drawn no numbers before."""
    torch.rand(3), np.random.rand(3), random.random()
    x, y = photos(n_train=64, n_valid=2, device="cpu").train.one_batch()
    code = (
        "from mixedfp.examples import photos\n"
        "x, y = photos(n_train=64, n_valid=2, device='cpu').train.one_batch()\n"
        "print(x.double().sum().item(), y.tolist())\n"
    )
    env = os.environ | {"PYTHONHASHSEED": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert run.stdout == f"{x.double().sum().item()} {y.tolist()}\n", run.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_are_made_for_the_device():
    fill = torch.zeros(8, 3, 8, 8, dtype=torch.uint8)
    labels = torch.arange(8) % 2
    dls = picture_dls((fill, labels), (fill, labels), ["a", "b"], bs=4, device="cuda")
    for dl in dls:
        x, y = dl.one_batch()
        assert x.device.type == y.device.type == "cuda"
    assert dls.to("cpu").train.one_batch()[0].device.type == "cpu"


@pytest.mark.parametrize("blocks", [[], 3, "12", [1, -1], [1.0], None])
def test_darknet_checks_its_blocks(blocks):
    with pytest.raises(ValueError, match="num_blocks=.*expected a list of integers"):
        Darknet(blocks, num_classes=2)
