"""Peak memory of the shipped model: an eighth or less with 16 micro-batches, flat from N = 2 on, one gradient buffer.

Run: pytest -n 0 tests/verification/test_memory_of_default_model.py. Measured here at 256 tokens, ZeRO 0: (N, B) =
(1, 16) peaks at 246.0 MB of activations, (16, 1) at 15.4 MB, 1/16; from N = 2 to 16 it is 4 bytes a micro-step more, a
kept loss; N = 1 to 2 adds 1.000 gradient buffers. Not covered: CUDA's allocator (no GPU here).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsaccum.config.deepspeed import load_deepspeed_config
from dsaccum.config.loading import load_experiment
from dsaccum.data import Samples
from dsaccum.engine.process import Ranks
from dsaccum.engine.schema import installed_schema
from dsaccum.verification.cases.case import Case, OrderRule, Vocabulary, WindowChoice
from dsaccum.verification.measures.memory import MemoryPeak, judge_memory, memory_cases
from dsaccum.verification.subject.tasks import measure_memory_of

BUCKET = 600_000
"""Elements: about a third of the model."""


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
