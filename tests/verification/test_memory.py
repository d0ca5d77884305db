"""Peak memory of a window: flat in N from 2 on, one gradient buffer more than at N = 1; kept graphs are found.

Run: pytest -n 0 tests/verification/test_memory.py. Tracked storages, so figures are exact and the same on every
machine. Measured here, default model at 256 tokens, ZeRO 0: (N, B) = (1, 16) peaks at 246.0 MB of activations, (16, 1)
at 15.4 MB, 1/16; from N = 2 to 16 it is 4 bytes a micro-step more, a kept loss; N = 1 to 2 adds 1.000 gradient buffers.
Not covered: CUDA's allocator (no GPU here).
"""

from __future__ import annotations

import gc
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsaccum.config.deepspeed import load_deepspeed_config
from dsaccum.config.loading import load_experiment
from dsaccum.data import Samples
from dsaccum.engine.process import Ranks
from dsaccum.engine.schema import installed_schema
from dsaccum.engine.window_engine import WindowEngine
from dsaccum.loss import CausalLMLoss
from dsaccum.verification.cases.case import Case, OrderRule, Vocabulary, WindowChoice
from dsaccum.verification.cases.windows import case_stream
from dsaccum.verification.measures.memory import MemoryPeak, judge_memory, measure_peak, memory_cases
from dsaccum.verification.subject.faults import fault_of
from dsaccum.verification.subject.loops import Subject, loop_of
from dsaccum.verification.subject.tasks import measure_memory_of
from tests.cases import StillDog, tiny_gpt
from tests.instruments.shared import measured_once
from tests.verification.planting import make_case

PARAMETERS = 27584
BUFFER = 4 * PARAMETERS
BUCKET = 600_000
"""Elements: about a third of the default model."""
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


def a_peak(steps: int, rows: int, activation: int, gradient: int, **more: Any) -> MemoryPeak:
    parts = {"parameter": 100, "gradient": gradient, "activation": activation, "optimizer": 200, "temporary": 0}
    default = {
        "accumulation_steps": steps, "micro_batch": rows, "peak_bytes": sum(parts.values()), "by_category": parts,
        "highest": parts, "in_forward": parts, "allocator_bytes": None, "gradient_buffer_bytes": 100,
        "data_bytes": 0, "kept_bytes": 0,
    }  # fmt: skip
    return MemoryPeak(**{**default, **more})


@pytest.mark.parametrize(
    ("grown", "gradient", "state"),
    [(0, 100, "pass"), (10, 100, "pass"), (11, 100, "fail"), (0, 81, "pass"), (0, 79, "fail"), (0, 120, "fail")],
)
def test_limits(grown: int, gradient: int, state: str) -> None:
    """1 % of 1,000 bytes of activations; 0.8 to 1.0 gradient buffer of 100 bytes."""
    peaks = [a_peak(1, 8, 4000, 0), a_peak(4, 2, 1000, gradient), a_peak(8, 2, 1000 + grown, gradient)]
    for stage, expected in ((0, state), (2, "fail" if grown > 10 else "pass")):
        found = judge_memory([[peak] for peak in peaks], make_case(stage=stage))
        assert found[1] == expected, found[2]
        assert (found[3] is not None) == (grown > 10)


@pytest.mark.parametrize(("stage", "ranks", "grown", "state"), [
    (2, 2, 40, "pass"), (2, 2, 42, "fail"), (2, 1, 12, "fail"), (0, 2, 12, "fail"),
])  # fmt: skip
def test_one_exchange_buffer_may_be_freed_late(stage: int, ranks: int, grown: int, state: str) -> None:
    """10 elements of 4 bytes in a bucket, and 1 byte of activations. Seen at ZeRO 2: 637 or 668 kB with N = 6."""
    case = make_case(stage=stage, ranks=ranks)
    case = replace(case, config={**case.config, "zero_optimization": {"stage": stage, "reduce_bucket_size": 10}})
    peaks = [a_peak(1, 8, 400, 0), a_peak(4, 2, 100, 100), a_peak(8, 2, 100, 100)]
    peaks[2] = replace(peaks[2], peak_bytes=peaks[1].peak_bytes + grown)
    assert judge_memory([[peak] for peak in peaks], case)[1] == state


def test_growth_that_is_no_activation_fails_without_a_finding() -> None:
    """As buffers that a loop adds in its backward."""
    temporary = {"parameter": 100, "gradient": 100, "activation": 1000, "optimizer": 200, "temporary": 500}
    more = a_peak(8, 2, 1000, 100, by_category=temporary, peak_bytes=1900)
    _, state, reason, finding = judge_memory([[a_peak(1, 8, 4000, 0)], [a_peak(4, 2, 1000, 100)], [more]], make_case())
    assert (state, finding) == ("fail", None)
    assert reason.startswith("rank 0: memory peaks at 1.4 kB with N = 4 and 1.9 kB with N = 8: 0.1 kB more at each")


def test_gradients_that_always_stand_are_said_to() -> None:
    """Some wrappers never free their buffer: nothing is added at N = 2, and that is no fault."""
    peaks = [a_peak(1, 8, 4000, 100), a_peak(4, 2, 1000, 100), a_peak(8, 2, 1000, 100)]
    _, state, reason, _ = judge_memory([[peak] for peak in peaks], make_case(stage=1))
    assert state == "pass"
    assert reason.endswith("accumulated gradients stand at N = 1 too")


def test_any_rank_can_fail_and_the_record_has_the_one_that_needs_most() -> None:
    good = [a_peak(1, 8, 4000, 0), a_peak(4, 2, 1000, 100), a_peak(8, 2, 1000, 100)]
    bad = [a_peak(1, 8, 4000, 0), a_peak(4, 2, 1100, 100), a_peak(8, 2, 1200, 100)]
    record, state, reason, finding = judge_memory(list(zip(good, bad, strict=True)), make_case(ranks=2))
    assert (state, reason.split(":")[0]) == ("fail", "rank 1")
    assert finding is not None
    assert finding["activation_bytes"] == [1100, 1200]
    assert record.by_category.activation == 1100


def test_a_long_window_is_measured_with_fewer() -> None:
    peaks = [a_peak(1, 32, 16000, 0), a_peak(16, 2, 1000, 100), a_peak(32, 2, 1000, 100)]
    _, state, reason, _ = judge_memory([[peak] for peak in peaks], make_case(steps=64))
    assert state == "pass"
    assert "N = 64 was not measured" in reason


def test_nothing_measured_is_untested() -> None:
    record, state, reason, finding = judge_memory([], make_case())
    assert (record.peak_bytes, state, reason, finding) == (None, "untested", "no window was measured", None)


class Context:
    """What a rank's task is given."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def at(self, step: int, micro_step: int, phase: str) -> None:
        pass

    def send(self, message: Any) -> None:
        pass


def default_model(repository: Path, json: str, steps: int, rows: int, fault: str | None = None) -> Case:
    """The shipped experiment and JSON with rows of random tokens, and buckets that suit the model."""
    experiment = load_experiment(repository / "launch/experiments/stdlib-nano.yaml")
    settings = load_deepspeed_config(
        repository / "ds_configs" / json, schema=installed_schema(), experiment=experiment, world_size=1,
        accumulation_steps=steps, micro_batch=rows,
    )  # fmt: skip
    length, count = experiment.data.sequence_length, settings.batch.total
    tokens = np.random.default_rng(0).integers(3, 259, length).astype(np.uint16)
    zeros = np.zeros(count, np.int64)
    samples = Samples(tokens, zeros, zeros + length, zeros, length, padded=False, dropped_tokens=0)
    buckets = {"reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET} if settings.zero_stage else {}
    zero = {**settings.config["zero_optimization"], **buckets}
    return Case(
        experiment=experiment, source="stdlib-nano.yaml", config={**settings.config, "zero_optimization": zero},
        batch=settings.batch, zero_stage=settings.zero_stage, precision=settings.precision,
        accumulation_dtype=settings.accumulation_dtype, gradient_clipping=1.0, vocabulary=Vocabulary(384, 1, 0),
        order=OrderRule(count, "continue", 0), samples=samples, probe_samples=samples,
        windows=(WindowChoice(0, probe=False),), fault=fault,
    )  # fmt: skip


@pytest.fixture(scope="module")
def default_peaks(one_rank: Ranks, repository: Path) -> Any:
    """Peaks of the default model by (JSON, N, B), each measured once."""
    known: dict[tuple[str, int, int], MemoryPeak] = {}

    def peak(steps: int, rows: int, json: str = "accum4.json") -> MemoryPeak:
        key = json, steps, rows
        if key not in known:
            known[key] = measure_memory_of(Context(one_rank), default_model(repository, json, steps, rows))  # type: ignore[arg-type]
        return known[key]

    return peak


def test_default_model_sixteen_micro_batches_against_one_big_batch(default_peaks: Any) -> None:
    assert default_peaks(16, 1).activation_bytes <= default_peaks(1, 16).activation_bytes / 8


def test_default_model_is_flat_from_two_micro_batches_on(default_peaks: Any) -> None:
    """The slope of the peak over N, fitted to four points, within 1 % of the activations per micro-step."""
    steps = [2, 4, 8, 16]
    peaks = [default_peaks(each, 1) for each in steps]
    activations = peaks[0].activation_bytes
    for level in ("peak", "activation", "forward"):
        values = [peak.levels[level] for peak in peaks]
        assert abs(np.polyfit(steps, values, 1)[0]) < 0.01 * activations
        # Far stricter, since nothing but a loss is kept: the whole way from 2 to 16.
        assert 0 <= values[-1] - values[0] <= 14 * 8


@pytest.mark.parametrize(("json", "bucket"), [("accum4.json", 0), ("zero1_accum4.json", 4 * BUCKET)])
def test_default_model_adds_one_gradient_buffer(default_peaks: Any, json: str, bucket: int) -> None:
    """While forward runs, where nothing else comes and goes; at ZeRO 1 DeepSpeed's reduce bucket stays as well then.

    The peak of everything rises by the same at ZeRO 0. At ZeRO 1 it is in the optimizer's step with N = 1.
    """
    one, two = default_peaks(1, 1, json), default_peaks(2, 1, json)
    buffer, kept_loss = one.gradient_buffer_bytes, 4
    rises = {level: (two.levels[level] - one.levels[level] - kept_loss) / buffer for level in one.levels}
    assert 0.8 <= (two.in_forward["gradient"] - one.in_forward["gradient"]) / buffer <= 1.0
    assert 0.8 <= rises["forward"] - bucket / buffer <= 1.0
    assert rises["peak"] <= 1.0 + bucket / buffer
    assert bucket or rises["peak"] >= 0.8


def test_default_model_with_kept_graphs_fails(one_rank: Ranks, repository: Path) -> None:
    """Control of the three above."""
    case = default_model(repository, "accum4.json", 2, 1, "activations-kept")
    peaks = [[measure_memory_of(Context(one_rank), split)] for split in memory_cases(case)]  # type: ignore[arg-type]
    _, state, _, finding = judge_memory(peaks, case)
    assert state == "fail"
    assert finding is not None
    assert finding["micro_batches_per_micro_step"] > 0.5
    first, second = peaks[1][0], peaks[2][0]
    assert (second.levels["peak"] - first.levels["peak"]) / 2 > 0.5 * first.activation_bytes / 2


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
