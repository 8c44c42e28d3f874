"""Files of `torch.distributed.checkpoint`: masters in and out, and a plain model reads them."""

import itertools

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from mixedfp.optimizer import with_masters
from mixedfp.testing import assert_same

OPTIONS = {
    "plain": {},
    "flattened": dict(flatten_optimizer_state_dict=True),
    "whole": dict(full_state_dict=True, cpu_offload=True),
}
X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


def new(flat, dtype=torch.bfloat16, seed=0, make=torch.optim.AdamW):
    """Return a small network and an optimizer with two groups; `flat` None: without masters."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))
    groups = [{"params": net[0].parameters()}, {"params": net[1:].parameters(), "lr": 0.02}]
    opt = make(groups, lr=0.01)
    return (net, opt) if flat is None else with_masters(net, opt, dtype=dtype, flat_master=flat)


def train(net, opt, n):
    """Take `n` steps; return the weights in 32 bits and the states."""
    for _ in range(n):
        opt.zero_grad()
        nn.functional.cross_entropy(net(X), Y).backward()
        opt.step()
    return net.state_dict(), opt.state_dict()["state"]


def through_dcp(source, target, folder, options):
    """Save the one and load it into the other, as PyTorch's tutorial does."""
    options = StateDictOptions(**options)
    model, optim = get_state_dict(*source, options=options)
    dcp.save({"model": model, "optim": optim}, checkpoint_id=folder)
    model, optim = get_state_dict(*target, options=options)
    found = {"model": model, "optim": optim}
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(
        *target,
        model_state_dict=found["model"],
        optim_state_dict=found["optim"],
        options=options,
    )


@pytest.mark.parametrize(
    ("options", "make"),
    # PyTorch itself brings no file of an SGD without states back as a whole
    [*((o, torch.optim.AdamW) for o in OPTIONS), ("plain", torch.optim.SGD)],
)
@pytest.mark.parametrize("flats", itertools.product((False, True), repeat=2))
def test_3_09_a_run_goes_on_from_a_dcp_file(tmp_path, flats, options, make):
    """Saved after two steps, loaded into others, three more: the bits of five."""
    first, second = (new(flat, make=make, seed=i) for i, flat in enumerate(flats))
    train(*first, 2)
    through_dcp(first, second, tmp_path, OPTIONS[options])
    assert_same(first[0].state_dict(), second[0].state_dict())
    assert_same(train(*second, 3), train(*first, 3))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("flat", [False, True])
def test_3_09_a_plain_model_reads_the_file_and_writes_one(tmp_path, flat, options):
    """In 32 bits to the last bit, there and back."""
    masters, plain, back = new(flat), new(None, seed=1), new(flat, seed=2)
    state = train(*masters, 2)
    through_dcp(masters, plain, tmp_path / "to", OPTIONS[options])
    assert_same((plain[0].state_dict(), plain[1].state_dict()["state"]), state)
    through_dcp(plain, back, tmp_path / "back", OPTIONS[options])
    assert_same(train(*back, 2), train(*masters, 2))


def test_3_09_asking_before_the_first_step_moves_no_weight():
    """PyTorch makes states by a step with rate 0: the masters keep their bits, and so the rates."""
    net, opt = new(True)
    before = net.state_dict()
    get_state_dict(net, opt)
    assert_same(net.state_dict(), before)
    assert [g["lr"] for g in opt.param_groups] == [0.01, 0.02]
