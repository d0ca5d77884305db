"""Whole processes against the clock: until they end, or until they have come so far."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from side_by_side import EXPERIMENT, REPOSITORY

LIMIT_S = 600.0


@dataclass(frozen=True)
class Process:
    """A command and the folder in which it runs."""

    command: Sequence[str]
    folder: Path


@dataclass(frozen=True)
class Start:
    """A command that is timed until it has come so far.

    Attributes:
        command: words; ``{folder}`` in them is a fresh one.
        sign: that it has, a file in that folder with something in it.
    """

    command: Sequence[str]
    sign: str


def training(config: Path, overrides: Sequence[str] = ()) -> Start:
    """``launch/train.py``, without its check before the start."""
    words = ["--deepspeed", str(config), "--output-dir", "{folder}/run", "--preflight", "off"]
    sets = [word for override in overrides for word in ("--set", override)]
    # A step is written down when the next one's counts have been exchanged, a moment after it is done.
    return Start([sys.executable, str(REPOSITORY / "launch/train.py"), *words, *sets], "run/metrics.jsonl")


def bare_training(config: Path, overrides: Sequence[str] = ()) -> Start:
    """``bare_start.py``: the same data and model, DeepSpeed and nothing else."""
    script = str(Path(__file__).with_name("bare_start.py"))
    return Start([sys.executable, script, str(config), str(EXPERIMENT), "{folder}/done", *overrides], "done")


def wall_seconds(process: Process) -> float:
    """From its start to its end."""
    began = time.perf_counter()
    done = subprocess.run(process.command, cwd=process.folder, capture_output=True, text=True, timeout=LIMIT_S)
    taken = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"{' '.join(process.command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return taken


def seconds_until(start: Start) -> float:
    """From the process's start; it is ended then."""
    with tempfile.TemporaryDirectory() as name:
        sign = Path(name) / start.sign
        command = [word.replace("{folder}", name) for word in start.command]
        with (Path(name) / "output").open("w+") as output:
            began = time.perf_counter()
            process = subprocess.Popen(command, cwd=name, stdout=output, stderr=subprocess.STDOUT)
            try:
                while not (sign.exists() and sign.stat().st_size):
                    if process.poll() is not None or time.perf_counter() - began > LIMIT_S:
                        output.seek(0)
                        sys.exit(f"{' '.join(command)}: it did not come so far\n{output.read()}")
                    time.sleep(0.002)
                return time.perf_counter() - began
            finally:
                process.kill()
                process.wait()


def rounds_of(measures: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, in turn; each round has an order of its own.

    A first round, which fills the system's caches, does not count.
    """
    draw = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in measures}
    for number in range(rounds + 1):
        for name in draw.sample(list(measures), len(measures)):
            taken = measures[name]()
            if number:
                seconds[name].append(taken)
    return seconds
