"""Ranks that die, hang or raise: all have ended within the limit, the one at fault is named, nobody is left behind.

Run: pytest tests/training/test_failures.py. Not covered: several machines; NCCL.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.training.launching import Ended, environment, train_command

FACTORY = Path(__file__).parent / "faulty.py"
TIMEOUT_S = 8
FLAGS = [
    "--set", f"model={{factory: '{FACTORY}:model'}}", "--set", f"loss.factory={FACTORY}:loss", "--steps", "500",
    "--set", "data.sequence_length=32", "--micro-batch", "2", "--set", f"run.timeout_s={TIMEOUT_S}",
]  # fmt: skip


def children_of(process: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def start(cwd: Path, **fault: str) -> subprocess.Popen:
    command = train_command(*FLAGS, ranks=2)
    return subprocess.Popen(
        command, cwd=cwd, env=environment(**fault), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_step(process: subprocess.Popen, step: int) -> str:
    said = ""
    for line in process.stdout:
        said += line
        if line.startswith(f"step {step:>3}/"):
            return said
    raise AssertionError(said + process.stderr.read())


def end(process: subprocess.Popen, family: list[psutil.Process], within_s: float) -> Ended:
    started = time.monotonic()
    try:
        stdout, stderr = process.communicate(timeout=within_s)
    finally:
        _, alive = psutil.wait_procs(family, timeout=max(1.0, started + within_s - time.monotonic()))
        for left in alive:
            left.kill()
        if process.poll() is None:
            process.kill()
    assert not alive, f"left behind: {alive}"
    return Ended(process.returncode, stdout, stderr, time.monotonic() - started)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("fault", "phase", "code", "named"),
    [
        ("kill", "forward", 247, "rank 1 has ended"),
        ("hang", "data", 3, "rank 1 hangs in data of step 3"),
        ("hang", "forward", 3, "rank 1 hangs in forward of step 3, micro-step 2"),
        ("raise", "forward", 3, "rank 1 failed in forward of step 3, micro-step 2: RuntimeError: out of memory, say"),
    ],
)
def test_a_rank_at_fault_ends_all_and_is_named(tmp_path: Path, fault: str, phase: str, code: int, named: str) -> None:
    # Targets are counted and forward runs four times a step (N = 4): call 10 belongs to micro-batch 2 of step 3.
    call = "10"
    process = start(tmp_path, FAULT=fault, FAULT_PHASE=phase, FAULT_RANK="1", FAULT_CALL=call)
    time.sleep(5)
    ended = end(process, children_of(process), within_s=60)
    assert ended.code == code, ended.said
    assert any(named in line for line in ended.errors), ended.said
    assert (tmp_path / "runs").exists()


@pytest.mark.distributed
@pytest.mark.parametrize("which", ["launcher", "launch process"])
def test_ranks_end_when_their_launcher_is_gone(tmp_path: Path, which: str) -> None:
    process = start(tmp_path)
    wait_for_step(process, 33)
    family = children_of(process)
    target = process.pid if which == "launcher" else family[0].pid
    os.kill(target, signal.SIGKILL)
    ended = end(process, family, within_s=30)
    assert [line for line in ended.errors if "the launcher is gone; stopped in" in line], ended.said


@pytest.mark.distributed
def test_sigterm_to_the_ranks_stops_at_a_boundary_and_saves(tmp_path: Path) -> None:
    import json

    process = start(tmp_path)
    wait_for_step(process, 33)
    family = children_of(process)
    ranks = [child for child in family if "train.py" in child.cmdline()[2]]
    ranks[-1].send_signal(signal.SIGTERM)  # one rank is enough: the others learn of it in the exchange
    ended = end(process, family, within_s=30)
    assert ended.code == 3
    assert any("stopped by SIGTERM after step" in line for line in ended.errors), ended.said
    (record,) = (tmp_path / "runs").glob("*/run.json")
    assert json.loads(record.read_text())["status"] == "interrupted"
    assert (record.parent / "model" / "model.safetensors").exists()
    steps = [json.loads(line)["step"] for line in (record.parent / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1)), "whole lines, none missing"
