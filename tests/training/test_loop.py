"""What the loop promises besides the right gradient: schedule, recorded loss, skipped steps, counters.

Run: pytest tests/training/test_loop.py. Not covered: the launcher and the file system (test_command.py).
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from dsaccum.engine.process import Ranks
from dsaccum.engine.window_engine import WindowEngine
from dsaccum.loss import CausalLMLoss
from dsaccum.training.outcome import RunFailed
from tests.cases import WEIGHT_DECAY, Case, Result, big_batch_loss, run_dsaccum, run_plain, stream_of, tiny_gpt
from tests.ranks import run_on_ranks

RAGGED = Case(accumulation_steps=4, micro_batch=4, padded=True, last_window="short", steps=8)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_schedule_advances_once_per_optimizer_step(one_rank: Ranks, stage: int) -> None:
    result = run_dsaccum(one_rank, replace(RAGGED, stage=stage))
    assert result.scheduler_steps == RAGGED.steps
    rates = [metrics.learning_rate for metrics in result.metrics]
    # Linear warm-up over 5 updates from 1e-4 to 3e-3; the first rate stands for two updates (DeepSpeed's own habit).
    expected = [1e-4 + (3e-3 - 1e-4) * min(5, max(0, step - 1)) / 5 for step in range(RAGGED.steps)]
    assert rates == pytest.approx(expected, rel=1e-6)


def test_recorded_loss_is_the_big_batch_loss(one_rank: Ranks) -> None:
    """Also in the short window (step 7) and the one after it; with the counts of samples and targets."""
    result = run_dsaccum(one_rank, RAGGED)
    assert [m.loss for m in result.metrics] == pytest.approx(run_plain(RAGGED), rel=1e-5)
    assert [m.samples for m in result.metrics] == [16, 32, 48, 64, 80, 96, 100, 116]
    loss, stream = CausalLMLoss(), stream_of(RAGGED, one_rank)
    counts = [sum(loss.count(mb) for mb in stream.window(step)) for step in range(RAGGED.steps)]
    assert [m.tokens for m in result.metrics] == [sum(counts[: i + 1]) for i in range(len(counts))]
    last_micro_batch_only = float(big_batch_loss(tiny_gpt(), replace(RAGGED, micro_batch=1), 0).detach())
    assert result.metrics[0].loss != pytest.approx(last_micro_batch_only, rel=1e-3), "control: a part is not the whole"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradient_norm_is_that_of_the_big_batch(one_rank: Ranks, stage: int) -> None:
    case = replace(RAGGED, stage=stage, steps=1, clipping=0.01)
    (metrics,) = run_dsaccum(one_rank, case).metrics
    model = tiny_gpt().double()
    big_batch_loss(model, case, 0).backward()
    truth = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    assert metrics.gradient_norm == pytest.approx(truth, rel=1e-5), "before clipping, at every stage"


class Poisoned(nn.Module):
    """A GPT whose logits are NaN in some micro-steps on one rank."""

    def __init__(self, poisoned_calls: set[int], rank: int, bad_rank: int) -> None:
        super().__init__()
        self.gpt, self.calls = tiny_gpt(), 0
        self.poisoned_calls = poisoned_calls if rank == bad_rank else set()

    def forward(self, **inputs: torch.Tensor):
        outputs = self.gpt(**inputs)
        self.calls += 1
        if self.calls in self.poisoned_calls:
            outputs.logits = outputs.logits * float("nan")
        return outputs


def poisoned_run(ranks: Ranks, case: Case) -> Result:
    # Calls 9 to 12 are the micro-steps of step 3 (N = 4): call 10 is its micro-step 2.
    return run_dsaccum(ranks, case, Poisoned({10}, ranks.rank, bad_rank=ranks.world_size - 1))


@pytest.mark.distributed
def test_a_nan_micro_batch_on_one_rank_is_skipped_by_all(tmp_path: Path) -> None:
    case = Case(world_size=2, accumulation_steps=4, micro_batch=2, steps=6)
    first, second = run_on_ranks(poisoned_run, 2, tmp_path, case)
    applied = [metrics.applied for metrics in first.metrics]
    assert applied == [True, True, False, True, True, True]
    assert first.metrics[2].loss is None
    assert first.metrics[2].gradient_norm is None
    assert all(math.isfinite(m.loss) for m in first.metrics if m.applied)
    assert first.notes == ["step 3 skipped on all ranks: the loss of rank 1, micro-step 2, is not finite (1 in a row)"]
    assert first.scheduler_steps == 5, "the schedule does not advance on a skipped step"
    assert [m.applied for m in second.metrics] == applied
    for name, tensor in first.parameters.items():
        assert torch.isfinite(tensor).all(), name


def test_a_clean_run_skips_nothing(one_rank: Ranks) -> None:
    """Control for the test above."""
    assert all(m.applied for m in run_dsaccum(one_rank, Case(accumulation_steps=4, micro_batch=4, steps=6)).metrics)


def test_too_many_skips_in_a_row_end_the_run(one_rank: Ranks) -> None:
    case = Case(accumulation_steps=4, micro_batch=4, steps=6, max_skipped=2)
    with pytest.raises(RunFailed, match="2 optimizer steps in a row"):
        run_dsaccum(one_rank, case, Poisoned(set(range(100)), 0, bad_rank=0))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_stages_skip_too(one_rank: Ranks, stage: int) -> None:
    case = Case(accumulation_steps=4, micro_batch=4, steps=5, stage=stage)
    result = run_dsaccum(one_rank, case, Poisoned({10}, 0, bad_rank=0))
    assert [m.applied for m in result.metrics] == [True, True, False, True, True]


class InfiniteLoss(CausalLMLoss):
    """A loss whose value is infinite in one micro-step while its gradient is finite."""

    def __init__(self, call: int) -> None:
        self._call, self._calls = call, 0

    def sum(self, outputs, micro_batch):
        self._calls += 1
        loss = super().sum(outputs, micro_batch)
        return loss + float("inf") if self._calls == self._call else loss


def test_a_loss_without_a_finite_value_is_not_made_up(one_rank: Ranks) -> None:
    case = Case(accumulation_steps=4, micro_batch=4, steps=3)
    result = run_dsaccum(one_rank, case, loss=InfiniteLoss(call=6))
    assert [m.loss is None for m in result.metrics] == [False, True, False]
    assert [m.applied for m in result.metrics] == [True, True, True]
    where = "the loss of rank 0, micro-step 2, is not finite"
    assert result.notes == [f"step 2 applied, its gradient is finite, and yet {where}"]


def test_a_batch_of_another_size_is_refused(one_rank: Ranks) -> None:
    case = Case(accumulation_steps=2, micro_batch=4)
    engine = WindowEngine(tiny_gpt(), case.config, case.batch, CausalLMLoss())
    good = {"input_ids": torch.ones(4, 8, dtype=torch.long), "labels": torch.ones(4, 8, dtype=torch.long)}
    short = {name: tensor[:3] for name, tensor in good.items()}
    with pytest.raises(ValueError, match="micro-batch 2: input_ids has 3 rows"):
        engine.run_window([good, short], 56)
    with pytest.raises(ValueError, match="a window is 2 micro-batches, got 1"):
        engine.run_window([good], 28)
    engine.engine.destroy()


class WithIdleLayer(nn.Module):
    """A GPT with a layer that the forward never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt, self.idle = tiny_gpt(), nn.Linear(4, 4)

    def forward(self, **inputs: torch.Tensor):
        return self.gpt(**inputs)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weight_decay_without_gradient_is_warned_of(one_rank: Ranks, stage: int) -> None:
    """And it does change them: by 1 - rate x decay at each step, the rates being 1e-4, 1e-4 and 6.8e-4 (see above)."""
    case, model = Case(accumulation_steps=4, micro_batch=4, steps=3, stage=stage), WithIdleLayer()
    before = model.idle.weight.detach().clone()
    result = run_dsaccum(one_rank, case, model)
    [note] = result.notes
    assert "no gradient reached idle.weight, idle.bias, yet weight decay changes them" in note
    factor = (1 - 1e-4 * WEIGHT_DECAY) ** 2 * (1 - 6.8e-4 * WEIGHT_DECAY)
    assert torch.allclose(result.parameters["idle.weight"], before * factor, rtol=3 * 2.0**-23, atol=0)
    assert not torch.equal(result.parameters["idle.weight"], before)
    assert run_dsaccum(one_rank, case).notes == [], "control: every parameter of the plain model gets a gradient"
