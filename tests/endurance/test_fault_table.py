"""Each row of the table in docs/failures.md: ranks end in time, one line names the fault, nothing stays, it goes on.

Run: pytest -n 0 -m slow tests/endurance/test_fault_table.py (half an hour). The table itself:
python -m tests.endurance.fault_table. Not covered: two machines (test_two_machines.py), kills at any moment
(test_kills.py), a full disk (test_faults.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.endurance.fault_table import FAULTS, STEP, Bench, bench

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(1800)]
END_S = 60.0
"""run.timeout_s is 30 here; the rest is for ranks and launcher to end."""
ENDS: dict[str, tuple[set[int], str, str]] = {
    "killed": ({247, 3}, "rank 1 has ended (last heard of in", "exact"),
    "first-killed": ({247, 3}, "rank 0 has ended", "exact"),
    "raises": ({3}, f"rank 1 failed in forward of step {STEP}, micro-step 2: RuntimeError: no more", "exact"),
    "hangs-in-data": ({3}, f"rank 1 hangs in data of step {STEP}", "exact"),
    "hangs-in-forward": ({3}, f"rank 1 hangs in forward of step {STEP}, micro-step 2", "exact"),
    "hangs-in-collective": ({3}, f"rank 1 hangs in backward of step {STEP}, micro-step 2", "exact"),
    "nan": ({0}, f"step {STEP} skipped on all ranks: the loss of rank 1, micro-step 2, is not finite", "exact"),
    "file": ({0}, "continued without it: code 2, error: ", "exact"),
    "slow-disk": ({0}, "none; step 12", "exact"),
    "unequal-data": ({2}, "data's content (sha256): rank 1 on ", "nothing to continue"),
    "stale-lock": ({0}, "none", "exact"),
    "port": ({3}, "is in use, by another run perhaps; fix: deepspeed --master_port", "nothing to continue"),
}
"""Fault -> (codes, what is said, how it goes on)."""


@pytest.fixture(scope="module")
def here() -> Iterator[Bench]:
    with bench() as folder:
        yield folder


def test_every_fault_of_the_table_is_held_to_something() -> None:
    assert ENDS.keys() == FAULTS.keys()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_ends_as_it_is_promised(here: Bench, name: str) -> None:
    codes, said, goes_on = ENDS[name]
    row = FAULTS[name](here)
    assert row.code in codes, row.said
    assert said in row.message, row.said
    assert (row.processes, row.segments) == (0, 0), row.said
    assert row.goes_on == goes_on, row.said
    if row.code == 3:
        assert row.seconds < END_S, row.said
