"""``--no-remedies``: what DeepSpeed itself gets wrong is seen, and named.

Run: pytest -n 0 tests/verification/test_no_remedies.py. bf16 at ZeRO 0 makes an empty optimizer step when the engine is
made (docs/deepspeed.md), so Adam's bias correction counts one too many. When DeepSpeed mends that, this test fails and
the remedy can go. The negative controls: the remedy, and ZeRO 1, which has no such step. Not covered: other DeepSpeed
versions.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dsaccum.verification.ranks.pools import RankPools
from tests.verification.verifying import Given, found

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_optimizer_that_counts_from_one_is_deepspeeds_own_fault(
    rank_pool: RankPools, tmp_path: Path, ranks: int
) -> None:
    record = Given(ranks=ranks, precision="bf16").verify(tmp_path, rank_pool, remedies=False)
    assert record.verdict == "not_equivalent"
    assert record.claims.which("fail") == ["update"], found(record)
    assert [(cause.id, cause.confidence) for cause in record.causes] == [("optimizer-count-offset", "certain")]
    [cause] = record.causes
    assert (cause.evidence["count_before_the_step"], cause.evidence["due"]) == (1, 0)
    assert "use ZeRO 1" in cause.fix
    assert record.remedies == []
    # Corrected as at count 2, not 1: (1 - b1) / (1 - b1^2) sqrt((1 - b2^2) / (1 - b2)), betas 0.9 and 0.95. Weight
    # decay and eps, which the count leaves alone, are less than 2 % of this update.
    assert record.steps[0].update.ratio == pytest.approx((0.1 / 0.19) * (0.0975 / 0.05) ** 0.5, rel=0.02)


@pytest.mark.parametrize(("stage", "remedies"), [(0, True), (1, False)])
def test_it_is_put_right_by_the_remedy_and_absent_at_zero_1(
    rank_pool: RankPools, tmp_path: Path, stage: int, *, remedies: bool
) -> None:
    record = Given(ranks=2, stage=stage, precision="bf16").verify(tmp_path, rank_pool, remedies=remedies)
    assert record.verdict == "equivalent", found(record)
    assert bool(record.remedies) == remedies
