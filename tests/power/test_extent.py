"""What a cell of the matrix measures: memory only where nothing else is wrong, no trajectory; the verdict is the same.

Run: pytest -n 0 tests/power/test_extent.py (ten seconds). Not covered: that memory finds what it looks for
(tests/verification/test_memory.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dsaccum.power.matrix import EXTENT
from dsaccum.power.settings import Setting
from dsaccum.power.small_case import write_case
from dsaccum.verification.cases.inputs import read_case
from dsaccum.verification.progress import SilentProgress
from dsaccum.verification.ranks.pools import RankPools
from dsaccum.verification.verify import Examined, Extent, examine, with_fault

pytestmark = pytest.mark.distributed


def examined(folder: Path, pools: RankPools, fault: str | None, extent: Extent) -> Examined:
    prepared = with_fault(read_case(write_case(folder, Setting(1, 3, 0, "packed"))), fault)
    return examine(prepared, pools.get(1), SilentProgress(), extent)


def test_memory_is_measured_where_nothing_else_is_wrong(rank_pool: RankPools, tmp_path: Path) -> None:
    clean = examined(tmp_path, rank_pool, None, EXTENT)
    assert clean.claims.memory == "pass"
    assert clean.evidence.trajectory.bound is None
    kept = examined(tmp_path, rank_pool, "activations-kept", EXTENT)
    assert [cause.id for cause in kept.causes] == ["activations-kept"]


def test_what_is_caught_already_has_no_memory_measured(rank_pool: RankPools, tmp_path: Path) -> None:
    caught = examined(tmp_path, rank_pool, "loss-not-scaled", EXTENT)
    assert caught.claims.memory == "untested"
    assert [cause.id for cause in caught.causes] == ["loss-not-scaled"]


def test_all_or_nothing(rank_pool: RankPools, tmp_path: Path) -> None:
    never = examined(tmp_path, rank_pool, None, Extent(memory="never"))
    assert never.claims.memory == "untested"
    assert never.evidence.trajectory.bound is not None
    always = examined(tmp_path, rank_pool, "loss-not-scaled", Extent(memory="always", trajectory=False))
    assert always.claims.memory == "pass"
