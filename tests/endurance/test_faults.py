"""What can go wrong with checkpoints in a run: no room, no directory, damage; and what stops a run by itself.

Run: pytest tests/endurance/test_faults.py. A full disk is played by a limit to the size of files (as the kernel's
RLIMIT_FSIZE sets it): the write itself fails in the middle of a file. Not covered: a file system that is full for
everything, also for metrics.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.endurance.running import EVERY, FLAGS, STEPS, config, differences, started, steps_in, train, wait_until
from tests.training.launching import environment, train_command

SLOW = pytest.mark.slow
LONG = 1000
"""Steps that take longer than a start."""
TOO_SMALL = 100_000
"""Bytes of a file: less than the state, more than everything else."""


def train_with_small_files(directory: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = train_command(*FLAGS, "--output-dir", directory.name, *flags, ranks=None, deepspeed=config())
    limited = ["prlimit", f"--fsize={TOO_SMALL}", *command]
    return subprocess.run(
        limited, cwd=directory.parent, env=environment(), capture_output=True, text=True, timeout=240, check=False
    )


@SLOW
def test_no_room_is_said_and_the_run_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = train_with_small_files(run)
    assert ended.returncode == 0, ended.stderr
    warned = [line for line in ended.stdout.splitlines() if line.startswith("warning: the checkpoint after step")]
    assert len(warned) == 3, "after 5, 10, and at the end"
    assert "could not be written (rank 0: File too large); there is none before it" in warned[0]
    assert list((run / "checkpoints").iterdir()) == []
    assert steps_in(run) == STEPS
    whole = tmp_path / "whole"
    assert train(whole).code == 0
    assert _losses(run) == _losses(whole), "the failures changed nothing"


def _losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_no_room_stops_the_run_where_that_is_asked_for(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = train_with_small_files(run, "--set", "run.on_checkpoint_error=stop")
    assert ended.returncode == 3
    assert f"error: the checkpoint after step {EVERY} could not be written (rank 0: File too large)" in ended.stderr
    assert json.loads((run / "run.json").read_text())["status"] == "failed"


@SLOW
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert train(whole).code == 0
    shutil.copytree(whole, broken)
    record = json.loads((broken / "run.json").read_text())
    (broken / "run.json").write_text(json.dumps({**record, "status": "running"}))
    state = broken / f"checkpoints/step-{STEPS}/state/mp_rank_00_model_states.pt"
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1
    state.write_bytes(content)
    shutil.rmtree(broken / "model")
    ended = train(broken)
    assert ended.code == 0, ended.said
    assert f"checkpoint broken/checkpoints/step-{STEPS} is damaged (state/mp_rank_00_model_states.pt: other bytes" in (
        ended.said
    )
    assert f"continued       from step {2 * EVERY} " in ended.said
    assert differences(whole, broken) == []
    for each in (broken / "checkpoints").glob("step-*/random-0.pt"):
        each.unlink()
    (broken / "run.json").write_text(json.dumps({**record, "status": "running"}))
    refused = train(broken)
    assert refused.code == 3
    assert "are damaged; fix: another --output-dir" in refused.errors[0]


@SLOW
def test_a_time_limit_stops_and_is_continued(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    long = ["--steps", str(LONG), "--set", "run.checkpoint_every=0"]
    unbroken = train(whole, *long)
    assert unbroken.code == 0, unbroken.said
    steps_s = sum(json.loads(line)["seconds"] for line in (whole / "metrics.jsonl").read_text().splitlines())
    minutes = round((unbroken.seconds - steps_s / 2) / 60, 2)  # in the midst of its steps, however busy the machine
    limited = train(broken, *long, "--set", f"run.max_minutes={minutes}")
    assert limited.code == 75, limited.said
    assert f"its time limit of {minutes:g} minutes (run.max_minutes) after step" in limited.said
    assert 0 < steps_in(broken) < LONG
    assert train(broken, *long).code == 0
    assert differences(whole, broken, LONG) == []


@SLOW
@pytest.mark.distributed
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_to_one_rank_stops_both(tmp_path: Path, number: signal.Signals) -> None:
    run = tmp_path / "run"
    with started(run, "--steps", "500", ranks=2) as process:
        assert wait_until(lambda: steps_in(run) >= 3, process)
        family = psutil.Process(process.pid).children(recursive=True)
        ranks = [each for each in family if "--local_rank=1" in each.cmdline() and "train.py" in each.cmdline()[2]]
        os.kill(ranks[-1].pid, number)
        assert process.wait(timeout=60) == 75
        _, alive = psutil.wait_procs(family, timeout=10)
        assert alive == []
    assert (
        "with a checkpoint; to continue: deepspeed --num_gpus 2 launch/train.py" in (tmp_path / "run.log").read_text()
    )


@SLOW
def test_a_second_run_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with started(run, "--steps", "5000") as process:
        assert wait_until(lambda: steps_in(run) >= 1, process)
        refused = train(run, "--steps", "5000")
        assert refused.code == 2
        assert "another run is at work in it" in refused.errors[0]


@SLOW
def test_a_directory_that_is_gone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with started(run, "--steps", "400") as process:
        assert wait_until(lambda: steps_in(run) >= 1, process)
        shutil.rmtree(run)
        code = process.wait(timeout=120)
    said = (tmp_path / "run.log").read_text()
    assert "could not be written (No such file or directory" in said
    assert code == 3, said
