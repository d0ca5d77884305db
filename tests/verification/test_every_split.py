"""One effective batch, split in every way, is one update: W, N and B, at every ZeRO stage, in fp32 and bf16.

Run: pytest -n 0 tests/verification/test_every_split.py -m "slow or not slow" (72 cases, twenty minutes on two idle
cores). ``--junit-xml=splits.xml`` keeps each case's largest error over its bound: the table of docs/verify.md. No
tolerance is set here: the verdict is the product's. Its negative controls are those of test_random_cases.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsaccum.verification.ranks.pools import RankPools
from dsaccum.verification.records.record import VerifyRecord
from tests.verification.verifying import Given, found

pytestmark = pytest.mark.distributed
EFFECTIVE_BATCH = 16
SPLITS = [(ranks, micro_steps) for ranks in (1, 2) for micro_steps in (1, 2, 4, 8, 16) if ranks * micro_steps <= 16]
CELLS = [*itertools.product(("fp32", "bf16"), range(4), SPLITS)]
IN_CI = {("fp32", 2, (2, 2))}


@pytest.mark.parametrize(
    ("precision", "stage", "split"),
    [pytest.param(*cell, marks=[] if cell in IN_CI else [pytest.mark.slow]) for cell in CELLS],
)
def test_every_split_is_the_same_update(
    rank_pool: RankPools,
    tmp_path: Path,
    precision: str,
    stage: int,
    split: tuple[int, int],
    record_property: Callable[[str, object], None],
) -> None:
    ranks, micro_steps = split
    rows = EFFECTIVE_BATCH // (ranks * micro_steps)
    given = Given(ranks=ranks, micro_steps=micro_steps, rows=rows, stage=stage, precision=precision)
    record = given.verify(tmp_path, rank_pool)
    assert record.verdict == "equivalent", found(record)
    assert record.effective_batch.total == EFFECTIVE_BATCH
    furthest = max(_errors_over_bounds(record))
    assert 0 < furthest <= 1
    record_property("error_over_bound", f"{furthest:.3f}")


def _errors_over_bounds(record: VerifyRecord) -> Iterator[float]:
    """Of each step's weights, gradient and update."""
    for step in record.steps:
        weights = step.micro_batch_weights
        for error, bound in (
            (weights.max_error, weights.tolerance),
            (step.gradient.error, step.gradient.bound),
            (step.update.error, step.update.bound),
        ):
            if error is not None and bound:
                yield error / bound
