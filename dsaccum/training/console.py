"""What people see while it runs: a progress bar on a terminal, plain lines elsewhere; rank 0 only."""

from __future__ import annotations

import contextlib
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dsaccum.training.metrics import StepMetrics

PLAIN_LINES = 15
"""About so many progress lines where there is no terminal, and one at least every ``PLAIN_SECONDS``."""
PLAIN_SECONDS = 30.0


class ConsoleProgress:
    """Shows steps as they come.

    Args:
        steps: optimizer steps of the whole run.
        is_first: whether this is rank 0; the others are silent.
    """

    def __init__(self, steps: int, *, is_first: bool) -> None:
        self._steps, self._is_first = steps, is_first
        self._seen_steps, self._seen_tokens, self._seconds, self._last_line = 0, 0, 0.0, 0.0
        self._bar: Progress | None = None
        if is_first and sys.stdout.isatty():
            self._bar = Progress(
                BarColumn(bar_width=12),  # the whole line fits 80 columns
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=Console(soft_wrap=True),
            )
            self._task = self._bar.add_task("", total=steps, figures="")
            self._bar.start()

    def go_on_from(self, step: int, tokens: int) -> None:
        """What an earlier process has done."""
        self._seen_steps, self._seen_tokens = step, tokens

    def note(self, line: str) -> None:
        """A line of its own, above the bar: warnings, skipped steps."""
        if not self._is_first:
            return
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            _print(line)

    def step(self, metrics: StepMetrics) -> None:
        """One optimizer step is done."""
        if not self._is_first:
            return
        tokens, self._seen_tokens = metrics.tokens - self._seen_tokens, metrics.tokens
        self._seconds += metrics.seconds
        figures = _figures(metrics, tokens / max(metrics.seconds, 1e-9))
        if self._bar is not None:
            self._bar.update(self._task, completed=metrics.step, figures=figures)
        elif self._due(metrics.step):
            left = self._seconds / (metrics.step - self._seen_steps) * (self._steps - metrics.step)
            progress = f"step {metrics.step:>{len(str(self._steps))}}/{self._steps}"
            _print(f"{progress}  {figures}  {left:.0f} s left")
            self._last_line = time.monotonic()

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()

    def _due(self, step: int) -> bool:
        every = max(1, self._steps // PLAIN_LINES)
        late = time.monotonic() - self._last_line > PLAIN_SECONDS
        return step in (self._seen_steps + 1, self._steps) or step % every == 0 or late


def _print(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody may be left to read it, and the run goes on
        print(line, flush=True)


def _figures(metrics: StepMetrics, tokens_per_second: float) -> str:
    loss = "skipped" if metrics.loss is None else f"loss {metrics.loss:.4f}"
    norm = "" if metrics.gradient_norm is None else f"  norm {metrics.gradient_norm:.3f}"
    return f"{loss}  lr {metrics.learning_rate:.2e}{norm}  {tokens_per_second:,.0f} tokens/s"
