"""SIGKILL at random moments, again and again: while stepping, while a checkpoint is written, while one is read.

Run: pytest -n 0 -s -m slow tests/endurance/test_kills.py (40 kills; KILLS_SEED=... repeats one). Half of them come when
the draft of a checkpoint appears. After ten of them the run is let to its end, and is compared with the run that was
never killed: to the bit. The comparison's control is in test_resume.py.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from tests.endurance.running import differences, drafts, kill, started, steps_in, train, wait_until

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS, EVERY, KILLS = 60, 4, 10
LONG = ["--steps", str(STEPS), "--set", f"run.checkpoint_every={EVERY}"]


@pytest.mark.parametrize(("ranks", "stage"), [(None, 0), (None, 2), (2, 0), (2, 2)])
def test_ten_kills(tmp_path: Path, ranks: int | None, stage: int) -> None:
    seed = int(os.environ.get("KILLS_SEED", time.time_ns() % 10**6))
    print(f"\nKILLS_SEED={seed}")
    choose = random.Random(seed)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    unbroken = train(whole, *LONG, ranks=ranks, stage=stage)
    assert unbroken.code == 0, unbroken.said
    killed = 0
    while killed < KILLS:
        way = "draft" if killed % 2 == 0 else choose.choice(["step", "start"])
        with started(broken, *LONG, ranks=ranks, stage=stage) as process:
            if _wait(way, choose, broken, process, unbroken.seconds):
                kill(process)
                killed += 1
                print(f"kill {killed} ({way}): {steps_in(broken)} lines, {_found(broken)}")
        assert steps_in(broken) < STEPS or killed == KILLS, "it ended before it could be killed: more steps are needed"
    log = (tmp_path / "broken.log").read_text()
    ended = train(broken, *LONG, ranks=ranks, stage=stage)
    assert ended.code == 0, ended.said
    assert differences(whole, broken, STEPS) == [], log
    assert _found(broken) == f"step-{STEPS - EVERY}, step-{STEPS}", "nothing else is left"


def _wait(way: str, choose: random.Random, run: Path, process, whole_s: float) -> bool:
    """Until the moment has come; False where the run has ended before it."""
    if way == "draft":  # of the first or second checkpoint of this start: with the first alone it would not go on
        goal, left = steps_in(run) + choose.randint(0, EVERY), drafts(run)
        seen = wait_until(lambda: steps_in(run) >= goal and bool(drafts(run) - left), process)
        time.sleep(choose.random() * 0.05)
        return seen and process.poll() is None
    if way == "step":
        goal = steps_in(run) + choose.randint(1, EVERY)
        return wait_until(lambda: steps_in(run) >= goal, process) and process.poll() is None
    lines, moment = steps_in(run), time.monotonic() + choose.random() * whole_s
    wait_until(lambda: time.monotonic() >= moment or steps_in(run) > lines, process)
    return process.poll() is None


def _found(run: Path) -> str:
    names = (path.name for path in (run / "checkpoints").glob("*"))
    return ", ".join(sorted(names, key=lambda name: (len(name), name)))
