"""Every shipped DeepSpeed JSON with the experiments that need no download is found equivalent, on 1 and 2 ranks.

Run: pytest -n 0 tests/verification/test_shipped.py -m "slow or not slow" (32 cases, 20 s each on two idle cores). What
is verified is what the command verifies, shrunk where it would be. The command itself, its output and its time are in
tests/cli.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dsaccum import verify
from dsaccum.verification.ranks.pools import RankPools
from tests.verification.verifying import found

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
REPOSITORY = Path(__file__).parents[2]


def test_there_are_configs() -> None:
    """The glob below does not go empty unseen."""
    assert len(list(REPOSITORY.glob("ds_configs/*.json"))) >= 8


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("experiment", ["stdlib-nano", "stdlib-functions"])
@pytest.mark.parametrize("config", sorted(REPOSITORY.glob("ds_configs/*.json")), ids=lambda path: path.stem)
def test_shipped_configs_are_equivalent(
    rank_pool: RankPools, config: Path, experiment: str, ranks: int, record_property: Callable[[str, object], None]
) -> None:
    chosen = REPOSITORY / f"launch/experiments/{experiment}.yaml"
    record = verify(config, experiment=chosen, ranks=ranks, pools=rank_pool)
    record_property("elapsed_s", f"{record.elapsed_s:.1f}")
    assert record.verdict == "equivalent", found(record)
    untested = list(record.claims.which("untested"))
    assert untested == [], record.reasons
