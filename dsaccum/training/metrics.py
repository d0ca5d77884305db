"""``metrics.jsonl``: one object per optimizer step, written as soon as the step is known, whole lines only."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step.

    Attributes:
        step: from 1.
        samples: samples seen by all ranks so far, this window's included.
        tokens: target tokens seen so far, this window's included.
        loss: mean over the window's target tokens on all ranks; None where the step was skipped.
        learning_rate: the rate used in this step.
        gradient_norm: before clipping; None where the step was skipped.
        seconds: from the end of the step before to the end of this one.
        applied: False where the gradient was not finite and the window was discarded.
        effective_batch: E, which a continued run may change.
        held_out_loss: after this step; None where it was not looked at.
    """

    step: int
    samples: int
    tokens: int
    loss: float | None
    learning_rate: float
    gradient_norm: float | None
    seconds: float
    applied: bool
    effective_batch: int
    held_out_loss: float | None = None


def read_metrics(path: Path, length: int) -> list[StepMetrics]:
    """The steps in the first ``length`` bytes.

    Raises:
        OSError: it cannot be read, or is shorter.
        ValueError: these are not the lines of steps 1, 2, ...
    """
    with path.open("rb") as file:
        content = file.read(length)
    if len(content) < length:
        raise OSError(errno.EIO, f"{len(content):,} bytes, and the checkpoint was made with {length:,}", str(path))
    return [_read_line(number, line) for number, line in enumerate(content.splitlines(), start=1)]


def _read_line(number: int, line: bytes) -> StepMetrics:
    try:
        metrics = TypeAdapter(StepMetrics).validate_json(line, strict=True)
    except ValueError as error:
        raise ValueError(f"line {number} is not one that a run writes") from error
    if metrics.step != number:
        raise ValueError(f"line {number} is of step {metrics.step}")
    return metrics


class MetricsFile:
    """Appends steps to ``metrics.jsonl``; each line reaches the file before the next step begins.

    Args:
        path: of the file.
        length: bytes that are kept; what a run that was ended wrote past its last checkpoint is written again.
    """

    def __init__(self, path: Path, length: int = 0) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._file.truncate(length)
        self._file.seek(0, os.SEEK_END)

    def make_durable(self) -> int:
        """All lines so far are on the disk; returns their length in bytes."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def write(self, metrics: StepMetrics) -> None:
        """Append one line."""
        numbers = {name: value if math.isfinite(value) else None for name, value in _given(metrics)}
        line = (json.dumps(asdict(metrics) | numbers, allow_nan=False) + "\n").encode()
        whole = self._file.tell()
        if self._file.write(line) != len(line):  # a full disk takes a part
            self._file.truncate(whole)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def close(self) -> None:
        """Write no more."""
        self._file.close()


def _given(metrics: StepMetrics) -> Iterator[tuple[str, float]]:
    return ((name, value) for name, value in asdict(metrics).items() if isinstance(value, float))
