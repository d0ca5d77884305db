"""``metrics.jsonl``: one object per optimizer step, written as soon as the step is known, whole lines only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


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
    """

    step: int
    samples: int
    tokens: int
    loss: float | None
    learning_rate: float
    gradient_norm: float | None
    seconds: float
    applied: bool


class MetricsFile:
    """Appends steps to ``metrics.jsonl``; each line reaches the file before the next step begins."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, metrics: StepMetrics) -> None:
        """Append one line."""
        self._file.write(json.dumps(asdict(metrics), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Write no more."""
        self._file.close()
