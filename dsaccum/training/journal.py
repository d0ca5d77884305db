"""Everything that a run tells: ``run.json``, ``metrics.jsonl``, the console, and DeepSpeed's monitors. Rank 0 only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dsaccum.batch import EffectiveBatch
from dsaccum.training.console import ConsoleProgress
from dsaccum.training.metrics import MetricsFile, StepMetrics
from dsaccum.training.outcome import say
from dsaccum.training.run_directory import RunDirectory

MonitorWriter = Callable[[list[tuple[str, float, int]]], None]


class Journal:
    """Keeps the run's record; on other ranks than the first it only remembers losses.

    Args:
        directory: where to write.
        record: what ``run.json`` holds besides its status.
        console: what people see.
        monitor: writes (name, value, samples) to DeepSpeed's monitors.
        is_first: whether this is rank 0.
        before: the steps that were done when the run was continued from a checkpoint.
        metrics_bytes: of ``metrics.jsonl`` that they take.
    """

    def __init__(
        self,
        directory: RunDirectory,
        record: dict[str, Any],
        console: ConsoleProgress,
        monitor: MonitorWriter,
        *,
        is_first: bool,
        before: Sequence[StepMetrics] = (),
        metrics_bytes: int = 0,
    ) -> None:
        self._directory, self._record, self._console, self._monitor = directory, record, console, monitor
        self._is_first = is_first
        self.losses: list[float] = []
        """Of the steps that were applied, in order."""
        self.tokens, self.seconds = 0, 0.0
        if before:
            self._remember(before)
        self._metrics = MetricsFile(directory.metrics, metrics_bytes) if is_first else None
        self._write_status("running")

    def step(self, metrics: StepMetrics) -> None:
        """One optimizer step is done."""
        self.tokens, self.seconds = metrics.tokens, self.seconds + metrics.seconds
        if metrics.loss is not None:
            self.losses.append(metrics.loss)
            # DeepSpeed itself writes the learning rate; nobody but us knows the window's token mean.
            self._monitor([("Train/Samples/train_loss", metrics.loss, metrics.samples)])
        if self._metrics is not None:
            self._metrics.write(metrics)
        self._console.step(metrics)

    def make_metrics_durable(self) -> int:
        """Rank 0: all lines so far are on the disk; returns their length in bytes."""
        assert self._metrics is not None
        return self._metrics.make_durable()

    def split_anew(self, batch: EffectiveBatch, step: int, line: str) -> None:
        """From this step on the effective batch is split otherwise; the line says why."""
        split = {"micro_batch": batch.micro_batch, "accumulation_steps": batch.accumulation_steps}
        self._record["effective_batch"] = {**self._record["effective_batch"], **split}
        self._record["split_anew"] = [*self._record["split_anew"], {"step": step, **split}]
        self._write_status("running")
        self.note(line)

    def note(self, line: str) -> None:
        """Show one line."""
        self._console.note(line)

    def end(self, status: str, **figures: Any) -> None:
        """The run is over: ``finished``, ``interrupted`` or ``failed``, with what is to be remembered of it."""
        self._console.close()
        self._write_status(status, **figures)
        if self._metrics is not None:
            self._metrics.close()

    def fail(self, reason: str, *, speaks: bool = False) -> None:
        """The run failed; safe to call from another thread, and never fails itself.

        A rank that ``speaks`` writes even if it isn't rank 0; the first to write is nearest to the cause.
        """
        self._console.close()
        if not (self._is_first or speaks) or self._directory.status() in ("failed", "finished", "interrupted"):
            return
        if not self._is_first and not self._directory.is_free():  # continued by another run already
            return
        try:
            self._directory.write_record({"status": "failed", "reason": reason, **self._record})
        except OSError as error:
            say(f"error: {self._directory.path} could not be told that the run failed: {error}")

    def _remember(self, steps: Sequence[StepMetrics]) -> None:
        self.losses = [step.loss for step in steps if step.loss is not None]
        self.tokens, self.seconds = steps[-1].tokens, sum(step.seconds for step in steps)
        self._console.go_on_from(steps[-1].step, self.tokens)

    def _write_status(self, status: str, **figures: Any) -> None:
        if self._is_first:
            self._directory.write_record({"status": status, **figures, **self._record})
