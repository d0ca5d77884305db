"""The usual check compares like with like: a model that a fault asks for is in both runs, the mistake in one.

Run: pytest -n 0 tests/power/test_usual_check.py (ten seconds). Not covered: what it sees of each fault (the record).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dsaccum.power.matrix import EXTENT
from dsaccum.power.settings import Setting
from dsaccum.power.small_case import write_case
from dsaccum.power.usual_check import final_parameters, parameters_agree
from dsaccum.verification.cases.inputs import read_case
from dsaccum.verification.progress import SilentProgress
from dsaccum.verification.ranks.pools import RankPools
from dsaccum.verification.subject.faults import FAULTS
from dsaccum.verification.verify import examine, run_windows, with_fault

pytestmark = pytest.mark.distributed


def test_what_a_fault_asks_of_both_sides_is_no_mistake(rank_pool: RankPools, tmp_path: Path) -> None:
    """A frozen parameter, alone, is equivalent; and the big batch has it, too."""
    pool = rank_pool.get(1)
    prepared = with_fault(read_case(write_case(tmp_path, Setting(1, 3, 0, "packed"))), "frozen-parameter-changed")
    asked = replace(prepared, case=replace(prepared.case, planted=False))
    clean = examine(asked, pool, SilentProgress(), EXTENT)
    assert clean.claims.which("fail") == []
    big = asked.case.split(1, asked.case.batch.total)
    _, captures, _ = run_windows(big, pool, SilentProgress())
    ours = final_parameters([step.optimizer_step for step in clean.evidence.steps])
    theirs = final_parameters([window[0].steps[-1] for window in captures])
    assert ours is not None
    assert theirs is not None
    assert ours.keys() == theirs.keys()
    assert parameters_agree(ours, theirs)


def test_these_ask_for_a_model() -> None:
    asking = {identifier for identifier, fault in FAULTS.items() if fault.asks_for_a_model}
    assert asking == {"frozen-parameter-changed", "absent-gradient-decayed"}
