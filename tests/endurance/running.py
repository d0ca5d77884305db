"""Runs that are ended and continued, and how two of them are compared: to the bit, but for the seconds."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from dsaccum.training.checkpoints.manifest import MANIFEST, Manifest, StreamOrigin
from tests.training.launching import REPOSITORY, TINY, Ended, environment, run_train, train_command

STEPS, EVERY = 12, 5
FLAGS = [*TINY, "--steps", str(STEPS), "--set", f"run.checkpoint_every={EVERY}"]
LIMIT_S = 120.0


def config(stage: int = 0) -> Path:
    name = "accum4.json" if stage == 0 else f"zero{stage}_accum4.json"
    return REPOSITORY / "ds_configs" / name


def train(
    directory: Path, *flags: str, ranks: int | None = None, stage: int = 0, env: dict[str, str] | None = None
) -> Ended:
    """To its end, in this directory."""
    return run_train(
        *FLAGS,
        "--output-dir",
        directory.name,
        *flags,
        cwd=directory.parent,
        ranks=ranks,
        deepspeed=config(stage),
        env=env,
    )


@contextlib.contextmanager
def started(
    directory: Path, *flags: str, ranks: int | None = None, stage: int = 0, env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A run that is going on; whatever is left of it ends with the block."""
    command = train_command(*FLAGS, "--output-dir", directory.name, *flags, ranks=ranks, deepspeed=config(stage))
    with (directory.parent / f"{directory.name}.log").open("a") as log:
        process = subprocess.Popen(
            command, cwd=directory.parent, env=env or environment(), stdout=log, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        family = [process.pid]
        try:
            yield process
        finally:
            for each in [*children(process), *map(_process, family)]:
                with contextlib.suppress(psutil.NoSuchProcess, AttributeError):
                    each.kill()
            process.wait(timeout=30)


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Of all generations."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).children(recursive=True)
    return []


def trainers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes that train: ranks, not their launchers."""
    found = []
    for each in [*children(process), *([] if process.poll() is not None else [psutil.Process(process.pid)])]:
        with contextlib.suppress(psutil.Error):
            words = each.cmdline()
            if any(word.endswith("launch/train.py") for word in words) and "launcher" not in " ".join(words[:4]):
                found.append(each)
    return [each for each in found if "deepspeed" not in Path(each.cmdline()[1]).name]


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str], limit_s: float = LIMIT_S) -> bool:
    """Whether it came to be before the process ended."""
    until = time.monotonic() + limit_s
    while process.poll() is None:
        if condition():
            return True
        assert time.monotonic() < until, "it never came to be"
        time.sleep(0.002)
    return condition()


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL to all of it at once."""
    for each in [*children(process), _process(process.pid)]:
        if each is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGKILL)
    process.wait(timeout=30)


def steps_in(directory: Path) -> int:
    with contextlib.suppress(OSError):
        return (directory / "metrics.jsonl").read_bytes().count(b"\n")
    return 0


def drafts(directory: Path) -> set[tuple[str, int]]:
    """Checkpoints that are being written, with their last change: what a killed run left changes no more."""
    found = set()
    for path in (directory / "checkpoints").glob("*.partial"):
        with contextlib.suppress(OSError):  # renamed meanwhile
            found.add((path.name, path.stat().st_ctime_ns))
    return found


def metrics(directory: Path) -> list[dict[str, Any]]:
    """All lines, without the seconds."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name != "seconds"} for line in lines]


def differences(one: Path, other: Path, step: int = STEPS) -> list[str]:
    """Everything that is not the same to the bit: metrics, and the whole state after the last step."""
    found = [] if metrics(one) == metrics(other) else ["metrics"]
    ours, theirs = one / f"checkpoints/step-{step}", other / f"checkpoints/step-{step}"
    names = sorted(str(path.relative_to(ours)) for path in ours.rglob("*.pt"))
    assert names, "there is nothing to compare"
    if names != sorted(str(path.relative_to(theirs)) for path in theirs.rglob("*.pt")):
        found.append("other files")
    for name in names:
        # Written by the run under test a moment ago; DeepSpeed's own classes are among it.
        a, b = (torch.load(each / name, weights_only=False) for each in (ours, theirs))
        found += [f"{name}{where}" for where in _unequal(a, b)]
    return found


def _unequal(a: Any, b: Any, where: str = "") -> Iterator[str]:
    if isinstance(a, torch.Tensor):
        if not (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)):
            yield where
    elif isinstance(a, dict):
        if a.keys() != b.keys():
            yield f"{where} keys"
        for key in a.keys() & b.keys():
            yield from _unequal(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        yield from [f"{where} length"] if len(a) != len(b) else _unequal_in(a, b, where)
    elif hasattr(a, "__dict__"):
        yield from _unequal(vars(a), vars(b), where)
    elif a != b:
        yield where


def _unequal_in(a: Sequence[Any], b: Sequence[Any], where: str) -> Iterator[str]:
    for index, pair in enumerate(zip(a, b, strict=True)):
        yield from _unequal(*pair, f"{where}[{index}]")


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def move_in_stream(checkpoint: Path, *, window: int, position: int) -> None:
    """Plant that its run goes on with other samples, in a manifest whose own checksum is right."""
    origin = StreamOrigin(window=window, position=position)
    manifest = Manifest.read(checkpoint).model_copy(update={"origin": origin})
    (checkpoint / MANIFEST).write_bytes(manifest.as_bytes())
