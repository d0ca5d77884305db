"""Peak memory of a window: flat in N from 2 on, one gradient buffer more than at N = 1; kept graphs are found.

Run: pytest -n 0 tests/verification/test_memory.py. Tracked storages, so figures are exact and the same on every
machine. Not covered: CUDA's allocator (no GPU here); the shipped model (test_memory_of_default_model).
"""

from __future__ import annotations

import gc
import pickle
from pathlib import Path
from typing import Any

import pytest

from dsaccum.engine.process import Ranks
from dsaccum.engine.window_engine import WindowEngine
from dsaccum.loss import CausalLMLoss
from dsaccum.verification.cases.case import Case
from dsaccum.verification.cases.windows import case_stream
from dsaccum.verification.measures.memory import MemoryPeak, judge_memory, measure_peak, memory_cases
from dsaccum.verification.subject.faults import fault_of
from dsaccum.verification.subject.loops import Subject, loop_of
from tests.cases import StillDog, tiny_gpt
from tests.instruments.shared import measured_once
from tests.verification.planting import make_case

PARAMETERS = 27584
BUFFER = 4 * PARAMETERS
LOOPS = Path(__file__).with_name("odd_loops.py")


def measured(ranks: Ranks, case: Case, prepare: Any = lambda module: None) -> tuple[MemoryPeak, int]:
    """The peak, and how many windows it took."""
    engine = WindowEngine(tiny_gpt(), case.config, case.batch, CausalLMLoss())
    subject, windows, loop = Subject(engine, ranks, StillDog()), case_stream(case, ranks.rank), loop_of(case.loop)
    prepare(engine.engine.module)
    runs: list[object] = []
    with fault_of(case.fault).planted(subject, case):
        peak = measure_peak(subject, case, lambda: runs.append(loop(subject, windows)))
    engine.engine.destroy()
    return peak, len(runs)


def peaks_of(ranks: Ranks, case: Case) -> list[list[MemoryPeak]]:
    """By split, of one rank."""
    return [[measured(ranks, split)[0]] for split in memory_cases(case)]


def judged(ranks: Ranks, case: Case) -> tuple[Any, str, str, dict[str, Any] | None]:
    return judge_memory(peaks_of(ranks, case), case)


def test_the_same_batch_is_split_and_doubled() -> None:
    def splits(steps: int, rows: int = 2) -> list[tuple[int, int]]:
        case = make_case(ranks=2, steps=steps, rows=rows)
        return [(c.batch.accumulation_steps, c.batch.micro_batch) for c in memory_cases(case)]

    assert splits(4) == [(1, 8), (4, 2), (8, 2)]
    assert splits(2) == [(1, 4), (2, 2), (4, 2)]
    assert splits(1) == [(1, 2), (2, 2)]
    assert splits(64) == [(1, 32), (16, 2), (32, 2)]


@pytest.mark.parametrize("padded", [False, True])
def test_all_rows_are_alike(padded: bool) -> None:
    """Rows of 2 to 16 tokens would make micro-batches of different widths. Padded ones keep a masked token."""
    shapes, visible = set(), set()
    for case in memory_cases(make_case(ranks=2, padded=padded)):
        assert len(pickle.dumps(case)) < 20_000
        for micro_batch in case_stream(case, 1).window(0):
            shapes |= {tuple(field.shape[1:]) for field in micro_batch.values()}
            if padded:
                visible |= set(micro_batch["attention_mask"].sum(1).tolist())
    assert shapes == {(16,)}
    assert visible == ({15} if padded else set())


@pytest.mark.parametrize(
    ("stage", "loop"),
    [
        *((stage, "dsaccum") for stage in range(4)),
        (0, "hf-labels"),
        *(
            pytest.param(stage, loop, marks=pytest.mark.slow)
            for stage in range(4)
            for loop in ("hf-labels", "outside-loss", f"{LOOPS}:two_forwards")
            if (stage, loop) != (0, "hf-labels")
        ),
    ],
)
def test_memory_is_flat(one_rank: Ranks, stage: int, loop: str) -> None:
    case = make_case(stage=stage, loop=loop)
    record, state, reason, finding = judged(one_rank, case)
    assert (state, finding) == ("pass", None), reason
    assert [(each.accumulation_steps, each.micro_batch) for each in record.runs] == [(1, 8), (4, 2), (8, 2)]
    assert record.peak_bytes == record.runs[1].peak_bytes
    assert record.by_category == record.runs[1].by_category
    assert sum(record.by_category.model_dump().values()) == record.peak_bytes


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_accumulation_costs_one_gradient_buffer(one_rank: Ranks, stage: int, bf16: bool, steps: int) -> None:
    case = make_case(stage=stage, bf16=bf16, steps=steps)
    peaks = [of_case[0] for of_case in peaks_of(one_rank, case)]
    one, several = peaks[0], peaks[1]
    assert one.gradient_buffer_bytes == several.gradient_buffer_bytes == BUFFER // (2 if bf16 else 1)
    assert one.in_forward["gradient"] == 0
    assert several.in_forward["gradient"] == several.gradient_buffer_bytes
    assert judge_memory([[peak] for peak in peaks], case)[1] == "pass"


@pytest.mark.parametrize(
    "stage", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3]
)
@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=pytest.mark.slow), 4])
def test_kept_graphs_are_found(one_rank: Ranks, stage: int, steps: int) -> None:
    """With retain_graph every micro-step leaves the larger part of a micro-batch's activations behind."""
    record, state, reason, finding = judged(one_rank, make_case("activations-kept", stage=stage, steps=steps))
    assert state == "fail"
    assert finding is not None
    assert finding["id"] == "activations-kept"
    assert finding["accumulation_steps"] == [steps, 2 * steps]
    assert finding["bytes_per_micro_step"] > 100_000
    assert 0.5 < finding["micro_batches_per_micro_step"] < 1
    assert "more at each micro-step" in reason
    assert record.reason == reason


@pytest.mark.parametrize("steps", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_garbage_that_waits_for_its_collector_is_not_kept(one_rank: Ranks, steps: int) -> None:
    """Else the verdict would depend on when the collector happens to run; here it doesn't by itself."""
    gc.disable()
    try:
        _, state, reason, finding = judged(one_rank, make_case(loop=f"{LOOPS}:leaves_cycles", steps=steps))
    finally:
        gc.enable()
    assert (state, finding) == ("pass", None), reason


def test_kept_logits_are_found_to_the_byte(one_rank: Ranks) -> None:
    """2 rows x 16 tokens x 50 logits x 4 bytes each time, and the loop's own losses: 4 bytes and their double."""
    _, state, _, finding = judged(one_rank, make_case(loop=f"{LOOPS}:keeps_logits"))
    assert state == "fail"
    assert finding is not None
    assert 6400 <= finding["bytes_per_micro_step"] <= 6400 + 12


def test_a_model_that_refuses_short_rows_gets_a_whole_window_first(one_rank: Ranks) -> None:
    """The optimizer's states must stand before the window that is measured, whatever the model takes."""

    def refuse(module: Any, arguments: Any, inputs: dict[str, Any]) -> None:
        if inputs["input_ids"].size(1) < 4:
            raise ValueError("too short")

    case = memory_cases(make_case())[1]
    usual, once = measured(one_rank, case)
    refused, twice = measured(one_rank, case, lambda module: module.register_forward_pre_hook(refuse, with_kwargs=True))
    assert (once, twice) == (1, 2)
    assert refused.by_category["optimizer"] == usual.by_category["optimizer"] >= 2 * BUFFER
    assert refused.levels == usual.levels


@pytest.mark.distributed
@pytest.mark.slow
def test_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> None:
    by_rank = measured_once(tmp_path_factory, "memory-two-ranks", measure, world_size=2)
    for stage in range(4):
        case = make_case(ranks=2, stage=stage)
        record, state, reason, _ = judge_memory(list(zip(*(found[stage] for found in by_rank), strict=True)), case)
        assert state == "pass", reason
        assert [run.accumulation_steps for run in record.runs] == [1, 4, 8]


def measure(ranks: Ranks) -> list[list[MemoryPeak]]:
    """By stage, by split."""
    return [[of_case[0] for of_case in peaks_of(ranks, make_case(ranks=2, stage=stage))] for stage in range(4)]
