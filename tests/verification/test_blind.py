"""Mistakes that a tester made who had not seen the code: each is named for what it is, or said not to be known.

Run: pytest -n 0 tests/verification/test_blind.py (a minute on two idle cores). The same cases without a mistake are
right. The faults of the table are tests/verification/test_faults_named.py's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsaccum.verification.ranks.pools import RankPools
from dsaccum.verification.records.record import Cause, VerifyRecord
from tests.verification.verifying import Given, found

pytestmark = pytest.mark.distributed
FAULTS = Path(__file__).with_name("blind_faults.py")


def run(folder: Path, pools: RankPools, fault: str | None, **given: Any) -> VerifyRecord:
    return Given(**given).verify(folder, pools, fault=f"{FAULTS}:{fault}" if fault else None)


def only_cause(record: VerifyRecord, identifier: str) -> Cause:
    assert [(cause.id, cause.confidence) for cause in record.causes] == [(identifier, "certain")], found(record)
    return record.causes[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_a_mistake_the_case_is_right(rank_pool: RankPools, tmp_path: Path, ranks: int) -> None:
    record = run(tmp_path, rank_pool, None, ranks=ranks)
    assert record.verdict == "equivalent", found(record)


# One tensor ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "parameter"), [("leaves_last_out", "ln_f.bias"), ("leaves_first_out", "wte.weight")])
def test_a_tensor_left_out_of_the_reduction(rank_pool: RankPools, tmp_path: Path, fault: str, parameter: str) -> None:
    """Of a clipped window the ranks' norms differ, and so do their parameters after it: both follow from it."""
    record = run(tmp_path, rank_pool, fault, ranks=2, clipping=0.1)
    cause = only_cause(record, "ranks-not-reduced")
    assert list(cause.evidence["parameters"]) == [f"transformer.{parameter}"]
    assert f"transformer.{parameter}" in cause.summary
    assert "all-reduce" in cause.fix


def test_a_left_over_in_one_tensor(rank_pool: RankPools, tmp_path: Path) -> None:
    record = run(tmp_path, rank_pool, "keeps_one_gradient")
    cause = only_cause(record, "stale-gradients")
    assert list(cause.evidence["parameters"]) == ["transformer.ln_f.bias"]
    assert cause.evidence["step"] == 2


@pytest.mark.parametrize(
    ("fault", "said", "fix"),
    [
        ("loses_two_micro_steps_of_one", "micro-steps 1, 2 missing", "zero_grad()"),
        ("halves_one", "0.5 of what is due", "multiplies"),
        ("turns_one_around", "no share of it", "not lost"),
    ],
)
def test_a_tensor_that_is_wrong_is_said_to_be_wrong_in_its_way(
    rank_pool: RankPools, tmp_path: Path, fault: str, said: str, fix: str
) -> None:
    cause = only_cause(run(tmp_path, rank_pool, fault), "parameter-gradient-lost")
    assert said in cause.summary
    assert fix in cause.fix
    assert list(cause.evidence["parameters"]) == ["transformer.h.0.attn.c_attn.weight"]
