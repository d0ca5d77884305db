"""Ranks that die, hang or raise: all have ended within the limit, the one at fault is named, nobody is left behind.

Run: pytest tests/training/test_failures.py. Not covered: several machines; NCCL.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.training.launching import TINY, Ended, environment, run_train, train_command

FACTORY = Path(__file__).parent / "faulty.py"
TIMEOUT_S = 8
KILLED = {247, 3}
"""The launcher passes on the code of the rank that it finds ended first: the killed one, or one that named it."""
FLAGS = [
    "--set", f"model={{factory: '{FACTORY}:model'}}", "--set", f"loss.factory={FACTORY}:loss", "--steps", "500",
    "--set", "data.sequence_length=32", "--micro-batch", "2", "--set", f"run.timeout_s={TIMEOUT_S}",
]  # fmt: skip


def children_of(process: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def start(cwd: Path, *, new_session: bool = False, **fault: str) -> subprocess.Popen:
    return subprocess.Popen(
        train_command(*FLAGS, ranks=2), cwd=cwd, env=environment(**fault), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=new_session,
    )  # fmt: skip


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


def record_of(folder: Path) -> dict:
    (record,) = (folder / "runs").glob("*/run.json")
    return json.loads(record.read_text())


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("fault", "phase", "rank", "code", "named"),
    [
        ("kill", "forward", 1, KILLED, "rank 1 has ended"),
        pytest.param("kill", "forward", 0, KILLED, "rank 0 has ended", marks=pytest.mark.slow),
        pytest.param("hang", "data", 1, {3}, "rank 1 hangs in data of step 3", marks=pytest.mark.slow),
        ("hang", "forward", 1, {3}, "rank 1 hangs in forward of step 3, micro-step 2"),
        (
            "raise",
            "forward",
            1,
            {3},
            "rank 1 failed in forward of step 3, micro-step 2: RuntimeError: no more",
        ),
    ],
)
def test_a_rank_at_fault_ends_all_and_is_named(
    tmp_path: Path, fault: str, phase: str, rank: int, code: set[int], named: str
) -> None:
    # Targets are counted and forward runs four times a step (N = 4): call 10 belongs to micro-batch 2 of step 3.
    process = start(tmp_path, FAULT=fault, FAULT_PHASE=phase, FAULT_RANK=str(rank), FAULT_CALL="10")
    time.sleep(5)
    ended = end(process, children_of(process), within_s=60)
    assert ended.code in code, ended.said
    assert any(named in line for line in ended.errors), ended.said
    record = record_of(tmp_path)
    assert record["status"] == "failed"
    assert f"rank {rank} " in record["reason"]


@pytest.mark.distributed
@pytest.mark.parametrize("which", ["launcher", pytest.param("launch process", marks=pytest.mark.slow)])
def test_ranks_save_and_end_when_their_launcher_is_gone(tmp_path: Path, which: str) -> None:
    process = start(tmp_path)
    wait_for_step(process, 33)
    family = children_of(process)
    target = process.pid if which == "launcher" else family[0].pid
    os.kill(target, signal.SIGKILL)
    ended = end(process, family, within_s=30)
    assert "stopped by the end of its launcher after step" in ended.said
    assert record_of(tmp_path)["status"] == "interrupted"


@pytest.mark.distributed
@pytest.mark.parametrize("target", [pytest.param("one rank", marks=pytest.mark.slow), "ctrl-c"])
def test_a_signal_stops_at_a_boundary_and_saves(tmp_path: Path, target: str) -> None:
    process = start(tmp_path, new_session=True)
    wait_for_step(process, 33)
    family = children_of(process)
    if target == "one rank":  # one is enough: the others learn of it in the exchange
        [child for child in family if "train.py" in child.cmdline()[2]][-1].send_signal(signal.SIGTERM)
    else:  # the terminal sends SIGINT to launcher, launch process and ranks alike
        os.killpg(process.pid, signal.SIGINT)
    ended = end(process, family, within_s=30)
    assert re.search(r"stopped by .* after step .*, with a checkpoint; to continue", ended.said), ended.said
    assert record_of(tmp_path)["status"] == "interrupted"
    (run,) = (tmp_path / "runs").iterdir()
    assert list(run.glob("checkpoints/step-*/checkpoint.json"))
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1)), "whole lines, none missing"
    assert len(steps) < 500, "control: it was stopped, not finished"


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        alone = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        ended = run_train(*TINY, "--steps", "1", cwd=tmp_path, env=environment() | alone)
    assert ended.code == 3
    assert len(ended.errors) == 1
    assert f"port {port} is in use" in ended.errors[0]
    assert f"--master_port {port + 1}" in ended.errors[0]
