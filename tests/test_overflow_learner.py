"""`learn.find_overflow()`: no cost until a step is skipped; then the same batch again."""

import pytest
import torch
from tiny import Callback, bits, make_learner
from torch import nn

from mixedfp.formats import MixedPrecisionError
from mixedfp.testing import assert_same


class Huge(nn.Module):
    """A layer whose numbers are too large inside, from batch `at` on, when it trains."""

    def __init__(self, at=0):
        super().__init__()
        self.linear, self.drop, self.at, self.n = nn.Linear(2, 2), nn.Dropout(0.5), at, 0

    def forward(self, x):
        self.n += self.training
        x = self.drop(self.linear(x))
        return (x * 0 + 300).square() * 0 + x if self.n > self.at else x


def with_huge(at=0, **kwargs):
    learn = make_learner("adam")
    torch.manual_seed(0)
    learn.model.append(Huge(at))
    learn.splitter = lambda m: [list(m.parameters())]
    return learn.to_fp16(**kwargs)


class Spoil(Callback):
    """Puts inf into a gradient of batch `at` (all: None); no pass reproduces that."""

    def __init__(self, at=None):
        self.at = at

    def after_backward(self):
        if self.at in (None, self.iter):
            self.learn.model[0].weight.grad.fill_(float("inf"))


def test_it_costs_nothing_until_a_step_is_skipped(monkeypatch):
    calls = []
    search = lambda *a, **k: calls.append(k["step"])  # noqa: E731
    monkeypatch.setattr("mixedfp.diagnose.overflow.find_overflow", search)
    learn = make_learner().to_fp16()
    learn.fit(1, 0.01)
    learn.fit(1, 0.01, cbs=Spoil(2))
    assert calls == []
    learn.find_overflow()
    assert calls == [6]


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
def test_the_module_is_named_and_the_learner_stays_as_it_is(flat):
    learn = with_huge(at=2, flat_master=flat)
    learn.fit(1, 0.01)
    before, random = bits(learn), torch.get_rng_state()
    found = learn.find_overflow()
    assert (found.phase, found.module, found.operation) == ("forward", "11", "pow")
    assert found.step == 3 and found.fix == "to_fp16(keep_fp32=['11'])"
    assert_same(bits(learn), before)
    assert torch.equal(torch.get_rng_state(), random)


def test_a_learner_that_keeps_the_module_in_32_bits_is_healthy():
    learn = with_huge(keep_fp32=["11"])
    learn.fit(1, 0.01)
    assert learn.mp_cb.n_skipped == 0
    assert learn.find_overflow(learn.dls.one_batch()) is None


def test_the_error_after_too_many_skips_names_the_module():
    with pytest.raises(MixedPrecisionError, match="(?s)in a row were skipped.*forward.*11 .Huge"):
        with_huge(max_skips=3).fit(1, 0.01)


def test_the_error_tells_if_nothing_is_reproduced():
    learn = make_learner().to_fp16(max_skips=2)
    with pytest.raises(MixedPrecisionError, match="Not reproduced"):
        learn.fit(1, 0.01, cbs=Spoil())
    with pytest.raises(MixedPrecisionError, match="no step was skipped so far"):
        make_learner().to_fp16().find_overflow()
