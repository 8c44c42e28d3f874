"""`learn.find_overflow()`, `heal`: nothing until a step is skipped; then the same batch again."""

import pytest
import torch
from inside import forget_notices, searches
from test_skip import fault_cb
from tiny import Do, bits, make_learner
from torch import nn

from mixedfp.checkpoint import Checkpoint
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


def with_huge(at=0, opt="adam", **kwargs):
    learn = make_learner(opt)
    torch.manual_seed(0)
    learn.model.append(Huge(at))
    learn.splitter = lambda m: [list(m.parameters())]
    return learn.to_fp16(**kwargs)


def test_it_costs_nothing_until_a_step_is_skipped(monkeypatch):
    calls = searches(monkeypatch)
    learn = make_learner().to_fp16()
    learn.fit(1, 0.01)
    assert calls == []
    learn.fit(1, 0.01, cbs=fault_cb("forward"))
    assert calls == ["random_state"]  # of the batch after the skipped one
    learn.find_overflow()
    assert calls == ["random_state", "find_in_batch"]


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
def test_a_learner_is_told_of_the_module_and_stays_as_it_is(flat):
    learn = with_huge(at=2, flat_master=flat)
    learn.fit(1, 0.01)
    before, random = bits(learn), torch.get_rng_state()
    found = learn.find_overflow()
    assert (found.phase, found.module, found.operation) == ("forward", "11", "pow")
    assert found.batch == 3 and "keep_fp32=['11']" in found.cures
    assert_same(bits(learn), before)
    assert torch.equal(torch.get_rng_state(), random)


def test_the_error_after_too_many_skips_says_it():
    with pytest.raises(MixedPrecisionError, match="(?s)in a row were skipped.*forward.*11 .Huge"):
        with_huge(max_skips=3).fit(1, 0.01)


def test_what_is_not_reproduced_is_said():
    learn = make_learner().to_fp16(max_skips=2)  # nobody knows of a gradient that is put there
    with pytest.raises(MixedPrecisionError, match="Not reproduced"):
        learn.fit(1, 0.01, cbs=Do("after_backward", spoil))
    with pytest.raises(MixedPrecisionError, match="no step was skipped so far"):
        make_learner().to_fp16().find_overflow()


def spoil(learn):
    learn.model[0].weight.grad.fill_(float("inf"))


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
def test_heal_keeps_the_module_in_32_bits_and_goes_on(flat, caplog):
    forget_notices()
    learn = with_huge(at=3, heal=2, flat_master=flat)
    learn.fit(2, 0.01)
    assert learn.mp_cb.skipped == [3, 4] and learn.model[11].linear.weight.dtype == torch.float32
    assert learn.mp_cb.healed == [(5, "keep_fp32=['11']")]
    assert "heal: from step 5 on keep_fp32=['11']" in caplog.text


@pytest.mark.parametrize("flat", [False, True], ids=["each", "flat"])
@pytest.mark.parametrize("opt", ["sgd", "adam", "torch_adamw"])
def test_a_module_goes_to_32_bits_without_a_bit_lost(opt, flat):
    learn = make_learner(opt).to_fp16(flat_master=flat)
    learn.fit(1, 0.01)
    before = bits(learn)
    learn.mp_cb.keep_more(["10"])
    after = bits(learn)
    assert_same(after["masters"], before["masters"])
    assert_same(after["opt"], before["opt"])
    assert_same(learn.model[10].weight.detach(), learn.model.state_dict()["10.weight"])
    learn.fit(1, 0.01)


def test_a_constant_scale_is_lowered():
    learn = make_learner().to_fp16(2.0**24, dynamic=False, heal=1)
    learn.fit(2, 0.001)
    assert learn.mp_cb.loss_scale < 2.0**24 and 1 <= learn.mp_cb.n_skipped < 8


def test_a_resumed_run_keeps_what_was_healed(tmp_path):
    learn = with_huge(at=1, heal=1)
    learn.fit(1, 0.01, cbs=Checkpoint(tmp_path / "run"))
    assert learn.mp_cb.healed
    other, checkpoint = with_huge(at=1, heal=1), Checkpoint(tmp_path / "run")
    start = checkpoint.resume(other)
    assert other.model[11].linear.weight.dtype == torch.float32
    other.fit(2, 0.01, cbs=checkpoint, start_epoch=start)
    assert other.mp_cb.n_skipped == 0


@pytest.mark.parametrize("keep", [(), "10", nn.Linear], ids=str)
def test_what_was_healed_outlives_two_resumes(keep, tmp_path):
    done = []
    for n_epoch in (1, 2, 3):
        learn = with_huge(at=1, heal=1, keep_fp32=keep) if keep != "10" else scaled_down(keep)
        checkpoint = Checkpoint(tmp_path / "run")
        start = checkpoint.resume(learn)
        assert learn.mp_cb.healed == done
        learn.fit(n_epoch, 0.001, cbs=checkpoint, start_epoch=start)
        done = done or learn.mp_cb.healed
        assert learn.mp_cb.healed == done != []


def scaled_down(keep):
    return make_learner().to_fp16(2.0**24, dynamic=False, heal=1, keep_fp32=keep)
