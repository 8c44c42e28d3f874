"""Tests of `mixedfp.examples` that need a module or a patched download."""

from itertools import product
from unittest import mock

import pytest
import torch
from fastai.vision.all import Learner
from PIL import Image

from mixedfp.examples import Darknet, cifar10, image_dls, photos
from mixedfp.testing import assert_same


def make_cifar10(root, classes=("airplane", "dog"), n=4):
    """Write a folder like CIFAR-10's, each image of one colour; return it."""
    for split, (k, name) in product(("train", "test"), enumerate(classes)):
        (root / split / name).mkdir(parents=True)
        for i in range(n):
            image = Image.new("RGB", (32, 32), (60 * k, 40, 10 * i))
            image.save(root / split / name / f"{i:04}.png")
    return root


@pytest.fixture
def patch(monkeypatch, tmp_path):
    """Make it a machine without CIFAR-10: no variable, an empty data folder, and no network."""

    no_network = mock.Mock(side_effect=OSError("no network"))
    monkeypatch.delenv("CIFAR10_PATH", raising=False)
    monkeypatch.setattr("mixedfp.examples.fastai_path", lambda name: tmp_path / "fastai" / name)
    monkeypatch.setattr("fastai.vision.all.untar_data", no_network)
    return monkeypatch


@pytest.mark.parametrize("download", [True, False])
def test_error_names_the_places(patch, tmp_path, download):
    with pytest.raises(FileNotFoundError) as e:
        cifar10(tmp_path / "typo", download=download)
    message, why = str(e.value), "no network" if download else "download=False"
    assert "no train/airplane, train/dog, test/airplane, test/dog in any of" in message
    assert f"{tmp_path}/typo, " in message and f"{tmp_path}/fastai/data/cifar10" in message
    assert f"untar_data(URLs.CIFAR): OSError: {why}" in message
    assert "set CIFAR10_PATH" in message and "photos(), which needs no" in message


def test_places_in_order(patch, tmp_path):
    downloaded = make_cifar10(tmp_path / "downloaded", n=2)
    patch.setattr("fastai.vision.all.untar_data", lambda url: downloaded)
    assert len(cifar10(bs=2).train_ds) == 4
    make_cifar10(tmp_path / "fastai" / "data" / "cifar10", n=3)
    assert len(cifar10(bs=2).train_ds) == 6
    patch.setenv("CIFAR10_PATH", str(make_cifar10(tmp_path / "env", n=4)))
    assert len(cifar10(bs=2).train_ds) == 8
    assert len(cifar10(make_cifar10(tmp_path / "path", n=5), bs=2).train_ds) == 10


def test_place_without_the_classes_is_passed_over_and_pictures_are_decoded_once(patch, tmp_path):
    patch.setenv("CIFAR10_PATH", str(make_cifar10(tmp_path / "two")))
    make_cifar10(tmp_path / "fastai" / "data" / "cifar10", ("airplane", "dog", "frog"))
    dls = cifar10(classes=("frog", "dog"), bs=2)
    assert list(dls.vocab) == ["frog", "dog"]
    assert dls.train_ds.x[0, :, 0, 0].tolist() == [120, 40, 0]
    patch.setattr(Image, "open", None)  # would raise
    again = cifar10(classes=("frog", "dog"), bs=2)
    assert again.train_ds.x.data_ptr() == dls.train_ds.x.data_ptr()


MISTAKES = [{name: bad} for name in ("n_train", "n_valid") for bad in (0, -1, True, 1.5, 1, 9)]
MISTAKES += [dict(classes=bad) for bad in ("dog", ("dog", "dog"), ("dog", "plane"))]


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_numbers_and_classes_are_checked(patch, tmp_path, mistake):
    ((name, bad),) = mistake.items()
    wanted = "expected two or more different" if name == "classes" else f"{bad}: expected 2 to 8"
    with pytest.raises(ValueError, match=f"{name}=.*{wanted}"):
        cifar10(make_cifar10(tmp_path / "cifar"), **mistake)


def test_flips_and_crops_follow_the_seed_alone_and_validation_pictures_never_move():
    passes = []
    for global_seed, seed in ((0, 42), (1, 42), (1, 1)):
        torch.manual_seed(global_seed)
        dls = photos(n_train=128, n_valid=8, bs=8, device="cpu", seed=seed)
        passes.append([x for x, _ in dls.train])
    assert_same(passes[0], passes[1])
    assert not torch.equal(passes[1][0], passes[2][0])
    norm = dls.valid.after_batch.fs[-1]
    expected = (dls.valid_ds.x.float() / 255 - norm.mean) / norm.std
    for _ in range(2):
        x = dls.valid.one_batch()[0].as_subclass(torch.Tensor)
        torch.testing.assert_close(x, expected, rtol=1e-6, atol=1e-6)


def test_a_training_picture_is_a_window_of_the_padded_one():
    """An independent way to the same: PyTorch's own reflection padding, all windows, both ways."""
    x = torch.randint(0, 256, (16, 3, 32, 32), dtype=torch.uint8)
    part, stats = (x, torch.arange(16) % 2), ([0.0] * 3, [1 / 255] * 3)
    dls = image_dls(part, part, ["a", "b"], stats, bs=16, device="cpu")
    padded = torch.nn.functional.pad(x.float(), (4, 4, 4, 4), mode="reflect")
    seen, images = [], dls.train.one_batch()[0].as_subclass(torch.Tensor).round()
    for r, c, flip in product(range(9), range(9), (0, 1)):
        windows = padded[:, :, r : r + 32, c : c + 32]
        windows = windows.flip(-1) if flip else windows
        same = (windows == images[:, None]).flatten(2).all(2).any(1)
        seen += [(r, c, flip)] * int(same.sum())
    assert len(seen) == 16 and {flip for *_, flip in seen} == {0, 1} and len(set(seen)) > 8


def test_all_images_are_predicted_and_shown():
    assert len(photos(bs=64, n_train=8, n_valid=2, device="cpu").train) == 1  # a small batch
    dls = photos(n_train=64, n_valid=8, bs=16, device="cpu")
    learn = Learner(dls, Darknet([1, 1], num_classes=2, nf=4))
    with learn.no_bar():
        probs, targets = learn.get_preds(ds_idx=0)
        learn.show_results(max_n=2)
    assert probs.shape == (64, 2) and targets.tolist() == [0] * 32 + [1] * 32
