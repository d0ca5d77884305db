"""What peaks of several splits say: limits, reasons, findings, and which rank decides.

Run: pytest -n 0 tests/verification/test_memory_judged.py. Peaks are made up; not covered: measuring them (test_memory).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dsaccum.verification.measures.memory import MemoryPeak, judge_memory
from tests.verification.planting import make_case


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
