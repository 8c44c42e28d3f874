"""Ray Train, as nbs/15_trainers.ipynb uses it: two workers, held against a loop by hand.

Where Ray is not installed it is skipped: pip install 'ray[train]' takes 440 MB.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_two_ranks
from torch.nn.parallel import DistributedDataParallel

from mixedfp.testing import assert_same

train: Any = pytest.importorskip("ray.train")
workers: Any = pytest.importorskip("ray.train.torch")


def by_hand(rank):
    """Return the states that a loop under DDP comes to."""
    from trainers import page

    model, opt, scaler = page["make"](torch.float16)
    page["by_hand"](DistributedDataParallel(model), opt, scaler, page["batches"](seed=rank))
    return {"model": model.state_dict(), "opt": opt.state_dict(), "scaler": scaler.state_dict()}


def fit(folder, **config):
    """Train with two workers; return the file that they wrote."""
    from trainers import page

    name = "-".join(config) or "whole"
    trainer = workers.TorchTrainer(
        page["ray_loop"],
        train_loop_config={"dtype": torch.float16, "stop": 6, "resume": None, **config},
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(storage_path=str(folder), name=name),
    )
    return str(Path(trainer.fit().checkpoint.path) / "state.pt")


def test_ray_ends_in_the_bits_of_a_loop_by_hand(tmp_path):
    """In one go, and from a file of its own half of the way."""
    (tmp_path / "ranks").mkdir()
    expected = on_two_ranks(by_hand, tmp_path / "ranks", ("trainers",))[0]
    whole, half = fit(tmp_path), fit(tmp_path, stop=3)
    for file in (whole, fit(tmp_path, resume=half)):
        found = torch.load(file, weights_only=True)
        assert found.pop("step") == 6
        assert_same(found, expected)
