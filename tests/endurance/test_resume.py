"""A run that is ended in any way and continued is the run that was never ended: to the bit, metrics included.

Run: pytest tests/endurance/test_resume.py; with -m slow, at every ZeRO stage. The comparison's own control: a run of
another seed differs. Not covered here: other splits (test_resplit.py), GPUs.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.endurance.running import (
    EVERY,
    STEPS,
    differences,
    kill,
    started,
    steps_in,
    train,
    wait_until,
)  # fmt: skip

pytestmark = pytest.mark.distributed
SLOW = pytest.mark.slow
CASES = [
    (None, 2), pytest.param(None, 0, marks=SLOW), pytest.param(2, 0, marks=SLOW), pytest.param(2, 1, marks=SLOW),
    pytest.param(2, 2, marks=SLOW), pytest.param(2, 3, marks=SLOW),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "stage"), CASES)
def test_killed_and_continued(tmp_path: Path, ranks: int | None, stage: int) -> None:
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    assert train(unbroken, ranks=ranks, stage=stage).code == 0
    with started(broken, ranks=ranks, stage=stage) as process:
        assert wait_until(lambda: steps_in(broken) >= EVERY + 2, process)
        kill(process)
    assert json.loads((broken / "run.json").read_text())["status"] == "running"
    assert EVERY + 2 <= steps_in(broken) < STEPS
    ended = train(broken, ranks=ranks, stage=stage)
    assert ended.code == 0, ended.said
    assert f"continued       from step {EVERY} " in ended.said
    assert differences(unbroken, broken) == []


@SLOW
def test_stopped_by_a_signal_and_continued(tmp_path: Path) -> None:
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    assert train(unbroken).code == 0
    with started(broken) as process:
        assert wait_until(lambda: steps_in(broken) >= 2, process)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(timeout=60) == 75
    log = (tmp_path / "broken.log").read_text()
    stopped = steps_in(broken)
    assert f"stopped by SIGTERM after step {stopped} of {STEPS}, with a checkpoint; to continue: deepspeed" in log
    assert "--resume broken" in log
    assert train(broken).code == 0
    assert differences(unbroken, broken) == []
    record = json.loads((broken / "run.json").read_text())
    assert [each["step"] for each in record["continued"]] == [stopped]


@SLOW
def test_another_seed_differs(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    assert train(one).code == train(other, "--set", "run.seed=1").code == 0
    found = differences(one, other)
    assert "metrics" in found
    assert any("module" in each for each in found)
