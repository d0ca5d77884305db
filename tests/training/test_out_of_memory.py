"""Memory that runs out on one rank in mid-window: B is halved on all, N doubled, and the run is as if begun that way.

Run: pytest tests/training/test_out_of_memory.py. The bound is that of every comparison of splits (test_resplit.py);
in bf16 the 240 tokens' losses are rounded to 8 bits each, and by chance: 2**-8 / sqrt(240) of their mean. Parameters
are held to one of the six steps, of at most 3e-3.
Controls: the window left out, and the window applied twice, are beyond the bound. Not covered: a GPU's own allocator.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dsaccum.allocator import is_out_of_memory
from dsaccum.batch import EffectiveBatch
from dsaccum.engine.out_of_memory import _State
from dsaccum.engine.process import Ranks
from dsaccum.engine.window_engine import WindowEngine
from dsaccum.loss import CausalLMLoss
from dsaccum.training.control import ControlExchange
from dsaccum.training.loop import TrainingLoop
from dsaccum.training.metrics import StepMetrics
from dsaccum.training.micro_batch import half_of
from dsaccum.training.outcome import RunFailed
from dsaccum.training.stop_request import StopRequest
from tests.cases import Case, StillDog, stream_of
from tests.ranks import run_on_ranks
from tests.training.scarce import MESSAGE, scarce_gpt

STEPS, WINDOW = 6, 3
BOUND = {"fp32": 1e-5, "bf16": 2**-8 / math.sqrt(240)}
PARAMETER_BOUND = {"fp32": 3e-5, "bf16": 3e-3 + 2**-8}
"""fp32: a hundredth of one step; where a gradient is next to 0, Adam's step hangs on its rounding."""
FORMATS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}
IN_CI = {(2, "fp32")}
Found = tuple[list[StepMetrics], dict[str, torch.Tensor], list[str | None], tuple[int, ...]]


def _run(ranks: Ranks, case: Case, call: int | None, where: str, fault: str | None = None, prompt: int = 0) -> Found:
    """Train; the last rank has no memory in this call. ``fault``: what becomes of the window instead.

    ``prompt``: so many tokens of each row are no targets.
    """
    model = scarce_gpt(call if ranks.rank == ranks.world_size - 1 else None, where)
    engine = WindowEngine(model, case.config, case.batch, CausalLMLoss(), recover=True)
    stream, told, metrics = stream_of(case, ranks), [], []
    stream.samples.prompt_lengths[:] = prompt

    def after_void_window(step: int, out_of_memory: str | None) -> Any:
        everyone: list[str | None] = [None] * ranks.world_size
        dist.all_gather_object(everyone, out_of_memory)
        if not any(everyone):
            return None
        told.extend(everyone)
        smaller = half_of(engine.batch)
        assert smaller is not None
        engine.run_again_as(smaller)
        again = stream.split_as(smaller)
        if fault == "left out":
            again.window = lambda index, real=again.window: real(index + 1)
        return again

    loop = TrainingLoop(
        engine=engine, stream=stream, exchange=ControlExchange(ranks.rank, engine.device), watchdog=StillDog(),
        stop=StopRequest(), record=metrics.append, note=lambda _: None, after_void_window=after_void_window,
    )  # fmt: skip
    loop.run(case.steps, max_skipped=3)
    state = {name: tensor.float().clone() for name, tensor in (engine.full_state_dict() or {}).items()}
    inner = engine.engine
    counters = (inner.global_steps, inner.skipped_steps, inner.micro_steps, inner.global_samples,
                inner.lr_scheduler.last_batch_iteration)  # fmt: skip
    inner.destroy()
    return metrics, state, told, counters


def _all_places(ranks: Ranks, case: Case) -> dict[str, Found]:
    """By where memory ran out, and of the run that had the final split from the beginning."""
    final = replace(case, accumulation_steps=2 * case.accumulation_steps, micro_batch=case.micro_batch // 2)
    in_window = (WINDOW - 1) * case.accumulation_steps + 2
    places = ("forward", "backward", "mid-backward")
    found = {where: _run(ranks, case, in_window, where) for where in places}
    return {
        **found,
        "first": _run(ranks, case, 1, "backward"),
        "final": _run(ranks, final, None, ""),
        "left out": _run(ranks, case, in_window, "forward", "left out"),
    }


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        pytest.param(stage, precision, marks=[] if (stage, precision) in IN_CI else [pytest.mark.slow])
        for stage in (0, 1, 2)
        for precision in FORMATS
    ],
)
def test_trajectory_is_that_of_the_final_split(tmp_path: Path, stage: int, precision: str) -> None:
    case = Case(
        world_size=2, accumulation_steps=2, micro_batch=4, stage=stage, steps=STEPS, precision=FORMATS[precision]
    )
    runs = run_on_ranks(_all_places, 2, tmp_path, case)[0]
    final, parameters, _, counters = runs["final"]
    for where in ("forward", "backward", "mid-backward", "first"):
        metrics, state, told, counted = runs[where]
        assert told == [None, MESSAGE], where
        assert _apart(metrics, final) < BOUND[precision], where
        assert _parameters_apart(state, parameters) < PARAMETER_BOUND[precision], where
        assert counted == counters, where
        assert [(m.step, m.samples, m.tokens, m.applied) for m in metrics] == [
            (m.step, m.samples, m.tokens, m.applied) for m in final
        ], where
    assert _apart(runs["left out"][0], final) > 10 * BOUND[precision], "control: another window's samples"


def _apart(metrics: list[StepMetrics], others: list[StepMetrics]) -> float:
    return max(abs(a.loss / b.loss - 1) for a, b in zip(metrics, others, strict=True) if a.loss and b.loss)


def _parameters_apart(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((tensor - other[name]).abs().max()) for name, tensor in state.items() if name != "seen")


@pytest.mark.parametrize("stage", [0, 2])
def test_stand_ins_without_targets_make_the_window_void_too(one_rank: Ranks, stage: int) -> None:
    """Supervised fine-tuning: the first tokens of each row are prompt, and the loss of the stand-in has gradient 0."""
    case = Case(accumulation_steps=2, micro_batch=8, stage=stage, steps=STEPS)
    final = replace(case, accumulation_steps=4, micro_batch=4)
    metrics, _, told, counters = _run(one_rank, case, 2 * WINDOW, "forward", prompt=12)
    others, _, _, expected = _run(one_rank, final, None, "", prompt=12)
    assert told == [MESSAGE]
    assert counters == expected
    assert _apart(metrics, others) < BOUND["fp32"]


def test_a_window_that_was_applied_all_the_same_ends_the_run(one_rank: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsaccum.engine.window_engine.nothing_finite", lambda _: 0.0)
    case = Case(accumulation_steps=2, micro_batch=8, steps=STEPS)
    with pytest.raises(RunFailed, match="was applied although this rank had no memory for it"):
        _run(one_rank, case, 2 * WINDOW, "forward", prompt=12)


def test_a_forward_that_counts_is_set_back(one_rank: Ranks) -> None:
    """What a void window left in buffers is gone: 16 rows a step, each seen once."""
    case = Case(accumulation_steps=2, micro_batch=8, steps=STEPS)
    _, state, told, _ = _run(one_rank, case, 2 * WINDOW, "backward")
    assert told == [MESSAGE]
    assert float(state["seen"]) == STEPS * case.batch.total


def test_with_dropout_the_draws_are_those_of_the_window(one_rank: Ranks) -> None:
    """A window that was given up draws nothing from the generators."""
    case = Case(accumulation_steps=2, micro_batch=8, steps=2)
    torch.manual_seed(0)
    _run(one_rank, case, None, "")
    undisturbed = torch.rand(1)
    torch.manual_seed(0)
    _run(one_rank, case, 1, "forward")
    assert torch.equal(torch.rand(1), undisturbed)


def test_without_recovery_it_is_raised(one_rank: Ranks) -> None:
    case = Case(accumulation_steps=2, micro_batch=8)
    engine = WindowEngine(scarce_gpt(1, "forward"), case.config, case.batch, CausalLMLoss())
    with pytest.raises(torch.OutOfMemoryError):
        engine.run_window(stream_of(case, one_rank).window(0), 100)
    engine.engine.destroy()


def test_another_error_is_not_taken_for_it(one_rank: Ranks) -> None:
    case = Case(accumulation_steps=2, micro_batch=8)
    model = scarce_gpt(None, "")
    model.gpt.transformer.register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("shapes do not match")))
    engine = WindowEngine(model, case.config, case.batch, CausalLMLoss(), recover=True)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        engine.run_window(stream_of(case, one_rank).window(0), 100)
    engine.engine.destroy()


def test_what_the_allocator_of_a_cpu_says() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)
    assert is_out_of_memory(torch.OutOfMemoryError(MESSAGE))
    assert not is_out_of_memory(RuntimeError("size mismatch"))


def test_loss_scales_are_set_back() -> None:
    """fp16 halves its scale after a discarded step; none was discarded for the sake of numbers here."""
    optimizer = SimpleNamespace(loss_scaler=SimpleNamespace(cur_scale=1024.0, cur_hysteresis=2))
    engine = SimpleNamespace(
        optimizer=optimizer, module=torch.nn.Linear(1, 1), global_steps=3, global_samples=48, skipped_steps=0
    )
    before = _State.of(engine)
    optimizer.loss_scaler.cur_scale, engine.skipped_steps, engine.global_steps = 512.0, 1, 4
    before.restore(engine)
    assert (optimizer.loss_scaler.cur_scale, engine.skipped_steps, engine.global_steps) == (1024.0, 0, 3)


@pytest.mark.parametrize(
    ("batch", "smaller"),
    [
        ((1, 2, 8), (1, 4, 4)),
        ((2, 1, 3), (2, 3, 1)),
        ((1, 1, 12), (1, 2, 6)),
        ((1, 2, 9), (1, 6, 3)),
        ((1, 4, 1), None),
    ],
)
def test_half(batch: tuple[int, int, int], smaller: tuple[int, int, int] | None) -> None:
    expected = None if smaller is None else EffectiveBatch(*smaller)
    assert half_of(EffectiveBatch(*batch)) == expected
