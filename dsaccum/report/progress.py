"""What people see on stderr while it works: a spinner on a terminal, a line for each stage elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TextIO

from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from dsaccum.verification.progress import Progress, SilentProgress

__all__ = ["PlainProgress", "Progress", "SilentProgress", "SpinnerProgress", "shown_progress"]


@contextlib.contextmanager
def shown_progress(stream: TextIO | None = None) -> Iterator[Progress]:
    """Progress on stderr, or on another stream; gone from a terminal afterwards."""
    stream = stream or sys.stderr
    if not stream.isatty():
        yield PlainProgress(stream)
        return
    spinner = SpinnerProgress(stream)
    try:
        yield spinner
    finally:
        spinner.close()


class PlainProgress:
    """``   3 s  starting 2 ranks``: seconds since the start, when a stage begins. Details are left out."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._started = stream, time.monotonic()

    def stage(self, text: str) -> None:
        """One line."""
        with contextlib.suppress(OSError):  # nobody may be left to read it, and the work goes on
            self._stream.write(f"{time.monotonic() - self._started:4.0f} s  {text}\n")
            self._stream.flush()

    def detail(self, text: str) -> None:
        """Nothing: a log would be full of them."""


class SpinnerProgress:
    """One line that moves: stage, detail, seconds since the start."""

    def __init__(self, stream: TextIO) -> None:
        console = Console(file=stream, highlight=False, markup=False)
        self._bar = Bar(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TextColumn("{task.fields[detail]}", markup=False, style="dim"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("", total=None, detail="")
        self._bar.start()

    def stage(self, text: str) -> None:
        """Replaces the stage before and its detail."""
        self._bar.update(self._task, description=text, detail="")

    def detail(self, text: str) -> None:
        """Beside the stage."""
        self._bar.update(self._task, detail=text)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._bar.stop()
