"""200 random cases: the right run is found equivalent, and one micro-batch's weight that is 1 % off is found out.

Run: pytest -n 0 tests/verification/test_random_cases.py for the first three (20 seconds on two idle cores), with
``-m slow`` for the rest (half an hour) and for how small an error is seen. Cases are drawn from a seed that is
the test's own parameter, not by hypothesis: each can be run again by itself, one failure hides no other, two processes
share them, and there is nothing to shrink at seconds a case.

No tolerance is set here: the verdict is the product's, on its own bounds. The planted error is each case's negative
control. Not covered: fp16, GPUs, W > 2, models that are shrunk.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from dsaccum.verification.ranks.pools import RankPools
from dsaccum.verification.records.record import VerifyRecord
from tests.verification.verifying import ADAMW, MODELS, WARM_UP, Given, found

pytestmark = pytest.mark.distributed
CASES, IN_CI, VARIED = 200, 3, 9
RATE, PLANTED = 3e-3, 0.01
OPTIMIZERS: list[dict[str, Any]] = [
    ADAMW,
    {"type": "Adam", "params": {"torch_adam": True, "adam_w_mode": False, "lr": RATE, "weight_decay": 0.01}},
    {"type": "SGD", "params": {"lr": 0.1}},
    {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}},
    {"type": "Adagrad", "params": {"lr": 0.01}},
]
SCHEDULES: list[dict[str, Any] | None] = [
    None,
    WARM_UP,
    {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 3e-4, "warmup_max_lr": RATE, "warmup_num_steps": 3,
                                         "total_num_steps": 20}},
    {"type": "WarmupCosineLR", "params": {"warmup_min_ratio": 0.1, "warmup_num_steps": 3, "total_num_steps": 20}},
    {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": RATE, "cycle_first_step_size": 4}},
    {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2,
                                       "lr_range_test_step_rate": 1.0, "lr_range_test_staircase": False}},
]  # fmt: skip
OWN_FAULT = """
from dsaccum.verification.subject.faults import Weighed

def planted():
    return Weighed(
        id="planted", summary="one micro-batch weighs {error:+.1e} more",
        factor=lambda case, rank, micro_step: 1 + {error} if (rank, micro_step) == ({rank}, {micro_step}) else 1.0,
    )
"""


@dataclass(frozen=True)
class Error:
    """A wrong weight: of which micro-batch, and by how much, relative."""

    rank: int
    micro_step: int
    size: float

    def write(self, folder: Path) -> str:
        """What ``--inject`` is given."""
        path = folder / "planted.py"
        path.write_text(OWN_FAULT.format(rank=self.rank, micro_step=self.micro_step, error=self.size))
        return f"{path}:planted"


def draw(seed: int) -> tuple[Given, Error]:
    """Case number ``seed``, and an error to plant into it."""
    choose = random.Random(f"case {seed}")  # of text: small numbers in a row draw alike
    optimizer = choose.choice(OPTIMIZERS)
    scheduler = choose.choice(SCHEDULES)
    if scheduler is not None and scheduler["type"] == "OneCycle" and "Adam" not in optimizer["type"]:
        # DeepSpeed cycles betas, which nothing but Adam has.
        scheduler = {**scheduler, "params": {**scheduler["params"], "cycle_momentum": False}}
    given = Given(
        architecture=choose.choice(list(MODELS)),
        ranks=choose.randint(1, 2),
        micro_steps=choose.randint(1, 6),
        rows=choose.randint(1, 3),
        stage=choose.randint(0, 3),
        precision=choose.choice(["fp32", "bf16"]),
        ragged=choose.random() < 0.5,
        length=8 * choose.randint(1, 4),
        clipping=choose.choice([0, 0.1, 1.0]),
        optimizer=optimizer,
        scheduler=scheduler,
        last_window=choose.choice(["continue", "drop", "short"]),
        seed=seed,
    )
    error = Error(choose.randrange(given.ranks), choose.randint(1, given.micro_steps), choose.choice([-1, 1]) * PLANTED)
    return given, error


MISSED_IN_BF16 = {110, 149, 199}
"""6 to 12 micro-batches added up in bf16, 40,000 parameters: 1 % of one is less than 2.5 times the noise of the sum."""


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] if seed >= IN_CI else []) for seed in range(CASES)]
)
def test_no_false_alarm_and_one_percent_is_caught(
    rank_pool: RankPools, tmp_path: Path, seed: int, record_property: Callable[[str, object], None]
) -> None:
    given, error = draw(seed)
    record_property("case", str(given))
    record_property("planted", str(error))
    right = given.verify(tmp_path, rank_pool, steps=2)
    record_property("error_over_bound", str(_error_over_bound(right)))
    assert right.verdict == "equivalent", f"false alarm: {given}\n{found(right)}"
    wrong = given.verify(tmp_path, rank_pool, steps=2, fault=error.write(tmp_path))
    record_property("weights", str([(w.max_error, w.tolerance) for w in (s.micro_batch_weights for s in wrong.steps)]))
    if seed in MISSED_IN_BF16:
        assert given.precision == "bf16"
        assert wrong.verdict == "equivalent", "it is caught now: take it out of the list"
        pytest.xfail("the weight's tolerance in bf16 is wider than the error")
    assert wrong.verdict == "not_equivalent", f"missed: {error} in {given}"
    assert wrong.claims.gradient == "fail", found(wrong)


def test_cases_are_as_different_as_they_should_be() -> None:
    """Every choice comes up, among all and but for a few among those of CI."""
    cases = [draw(seed)[0] for seed in range(CASES)]
    for attribute, count in (
        ("architecture", 5), ("ranks", 2), ("micro_steps", 6), ("rows", 3), ("stage", 4), ("precision", 2),
        ("ragged", 2), ("length", 4), ("clipping", 3), ("last_window", 3),
    ):  # fmt: skip
        assert len({getattr(case, attribute) for case in cases}) == count
        assert len({getattr(case, attribute) for case in cases[:VARIED]}) >= min(count, 3)
    assert len({str(case.optimizer) for case in cases}) == len(OPTIMIZERS)
    assert len({case.scheduler["type"] if case.scheduler else None for case in cases}) == len(SCHEDULES)


FIXED = Given(ranks=2, micro_steps=4, stage=1)


@pytest.mark.parametrize("size", [1e-3, pytest.param(-1e-3, marks=pytest.mark.slow)])
def test_a_tenth_of_a_percent_is_caught_in_fp32(rank_pool: RankPools, tmp_path: Path, size: float) -> None:
    wrong = FIXED.verify(tmp_path, rank_pool, steps=2, fault=Error(1, 3, size).write(tmp_path))
    assert wrong.verdict == "not_equivalent"
    assert wrong.claims.gradient == "fail"


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "wanted"), [("fp32", 1e-3), ("bf16", 1e-2), ("autocast", 1e-2)])
def test_the_smallest_error_caught(
    rank_pool: RankPools, tmp_path: Path, precision: str, wanted: float, record_property: Callable[[str, object], None]
) -> None:
    """From 10 % down; the first size that is missed ends the search."""
    smallest = None
    given = replace(FIXED, precision=precision)
    for exponent in (-1, -1.5, -2, -2.25, -2.5, -2.75, -3, -3.5, -4, -4.5, -5, -5.5, -6, -6.5, -7):
        size = 10.0**exponent
        record = given.verify(tmp_path, rank_pool, steps=2, fault=Error(1, 3, size).write(tmp_path))
        if record.verdict == "equivalent":
            break
        smallest = size
    record_property("smallest_error_caught", smallest)
    record_property("missed", size)
    assert smallest is not None
    assert smallest <= wanted * 1.0001


def _error_over_bound(record: VerifyRecord) -> list[float]:
    return [(step.gradient.error or 0.0) / (step.gradient.bound or 1.0) for step in record.steps]
