"""What goes wrong while ``dsaccum verify`` runs ends it: in time, in one line that says which rank and where, with no
process left.

Run: pytest -n 0 tests/verification/test_survival.py (a minute on two idle cores), and ``-m slow`` for the hang, which
waits for the ranks' limit of 60 s. The real command in a process of its own. Processes are found by a mark in their
environment, so one that was handed to init would be seen as well. Not covered: a machine that runs out of memory.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from tests.training.launching import environment
from tests.verification.verifying import Given

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]
START_S = 180
"""For importing torch and DeepSpeed three times on a busy machine."""
RANKS_LIMIT_S = 60
AT_STEP_2 = 5
"""The forward of micro-step 2 in step 2, with N = 3."""
ODD = """
import os, pathlib, time
import torch
from types import SimpleNamespace
from dsaccum.loss import CausalLMLoss

HERE = pathlib.Path(__file__).parent
ON_RANK_1 = os.environ.get("RANK") == "1"  # the command's own process has no RANK

class Model(torch.nn.Module):
    def __init__(self, vocabulary_size):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(vocabulary_size, 8), torch.nn.Linear(8, vocabulary_size)
        self.calls = 0

    def forward(self, input_ids):
        self.calls += 1
        if ON_RANK_1 and self.calls == {call}:
            (HERE / "unfinished").write_text(str(os.getpid()))
            (HERE / "unfinished").rename(HERE / "stands")
            time.sleep(3600)
        return SimpleNamespace(logits=self.head(self.embedding(input_ids)))

def sleeps(vocabulary_size, sequence_length):
    return Model(vocabulary_size)

def raises(vocabulary_size, sequence_length):
    raise RuntimeError("no more")

def raises_on_a_rank(vocabulary_size, sequence_length):
    if ON_RANK_1:
        raise RuntimeError("no more")
    return Model(vocabulary_size)

class Loss(CausalLMLoss):
    calls = 0

    def sum(self, outputs, micro_batch):
        self.calls += 1
        total = super().sum(outputs, micro_batch)
        return total * float("nan") if ON_RANK_1 and self.calls == {call} else total

def nan():
    return Loss()
"""


@dataclass
class Ended:
    """How the command ended, and how long that took once something went wrong."""

    code: int
    said: str
    seconds: float

    @property
    def errors(self) -> list[str]:
        return [line for line in self.said.splitlines() if line.startswith("error:")]


class Running:
    """The command, leader of a process group of its own, as a shell would start it."""

    def __init__(self, folder: Path, *flags: str, **experiment: Any) -> None:
        self.folder, self._mark = folder, uuid.uuid4().hex
        (folder / "odd.py").write_text(ODD.replace("{call}", str(AT_STEP_2)))
        deepspeed, experiment_file = Given(ranks=2, experiment=experiment).write(folder)
        words = ["--deepspeed", str(deepspeed), "--experiment", str(experiment_file), "--ranks", "2", *flags]
        self._output: IO[bytes] = (folder / "output").open("wb")
        self.process = subprocess.Popen(
            [str(Path(sys.executable).parent / "dsaccum"), "verify", *words],
            env=environment(DSACCUM_TEST_MARK=self._mark),
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._since = time.monotonic()

    def wait_until_rank_1_stands(self) -> int:
        """Its process id, once it has come to the forward in which it stays."""
        stands, end = self.folder / "stands", time.monotonic() + START_S
        while not stands.exists():
            assert self.process.poll() is None, self.said
            assert time.monotonic() < end, f"it never came so far: {self.said}"
            time.sleep(0.05)
        self._since = time.monotonic()
        return int(stands.read_text())

    def end(self, within_s: float) -> Ended:
        code = self.process.wait(within_s)
        return Ended(code, self.said, time.monotonic() - self._since)

    @property
    def said(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def processes(self) -> list[int]:
        """Everything that the command started, itself included, wherever it hangs now."""
        return [process.pid for process in psutil.process_iter() if _has_mark(process, self._mark)]

    def close(self) -> None:
        self._output.close()
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("DSACCUM_TEST_MARK") == mark
    except psutil.Error:  # ended meanwhile, or another user's
        return False


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(*flags: str, **experiment: Any) -> Running:
        started.append(Running(tmp_path, *flags, **experiment))
        return started[-1]

    yield start
    for each in started:
        each.close()


def factory(folder: Path, name: str) -> dict[str, Any]:
    return {"factory": f"{folder}/odd.py:{name}"}


def assert_nothing_left(command: Running) -> None:
    end = time.monotonic() + 5  # a killed process may take a moment to be gone
    while command.processes() and time.monotonic() < end:
        time.sleep(0.1)
    assert command.processes() == []


def test_a_killed_rank_is_named(run: Callable[..., Running], tmp_path: Path) -> None:
    command = run(model=factory(tmp_path, "sleeps"))
    rank_1 = command.wait_until_rank_1_stands()
    assert rank_1 in [child.pid for child in psutil.Process(command.process.pid).children(recursive=True)]
    assert len(command.processes()) >= 3, "the control: the command and both ranks are seen while they live"
    os.kill(rank_1, signal.SIGKILL)
    ended = command.end(within_s=30)
    assert ended.code == 3
    [error] = ended.errors
    assert error.startswith("error: rank 1 was killed (signal 9) at step 2, micro-step 2, forward")
    assert "Traceback" not in ended.said
    assert_nothing_left(command)


@pytest.mark.parametrize("name", [pytest.param("raises", marks=pytest.mark.slow), "raises_on_a_rank"])
def test_a_factory_that_raises_is_the_users_to_mend(run: Callable[..., Running], tmp_path: Path, name: str) -> None:
    command = run(model=factory(tmp_path, name))
    ended = command.end(within_s=START_S)
    assert ended.code == 2
    [error] = ended.errors
    assert error.startswith(f"error: {tmp_path}/experiment.yaml: model.factory")
    assert "the function raised RuntimeError: no more (at odd.py:" in error
    assert error.endswith(f" in {name})")
    assert "Traceback" not in ended.said
    assert_nothing_left(command)


@pytest.mark.slow
def test_a_forward_that_hangs_on_one_rank_is_named(run: Callable[..., Running], tmp_path: Path) -> None:
    command = run(model=factory(tmp_path, "sleeps"))
    command.wait_until_rank_1_stands()
    ended = command.end(within_s=RANKS_LIMIT_S + 20)
    assert ended.seconds > RANKS_LIMIT_S - 2, "the control: it was the limit that ended it"
    assert ended.code == 3
    [error] = ended.errors
    assert error.startswith("error: rank 1 hangs at step 2, micro-step 2, forward: no rank moved for 60 s; rank 0 ")
    assert_nothing_left(command)


@pytest.mark.slow
def test_nan_in_one_micro_batch_is_a_named_cause(run: Callable[..., Running], tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    command = run("--json", str(record), loss=factory(tmp_path, "nan"))
    ended = command.end(within_s=START_S)
    assert (ended.code, ended.errors) == (1, []), ended.said
    [cause] = json.loads(record.read_text())["causes"]
    assert cause["id"] == "non-finite-gradient"
    where = {key: cause["evidence"][key] for key in ("step", "rank", "micro_step")}
    assert where == {"step": 2, "rank": 1, "micro_step": 2}
    assert_nothing_left(command)


@pytest.mark.slow
def test_ctrl_c_ends_it(run: Callable[..., Running], tmp_path: Path) -> None:
    command = run(model=factory(tmp_path, "sleeps"))
    command.wait_until_rank_1_stands()
    os.killpg(command.process.pid, signal.SIGINT)
    ended = command.end(within_s=20)
    assert ended.code == 3
    assert ended.errors == ["error: interrupted; nothing is proven"]
    assert "Traceback" not in ended.said
    assert_nothing_left(command)
