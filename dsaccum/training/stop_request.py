"""SIGTERM and SIGINT ask the run to stop at the next boundary; asking again, later, ends this rank at once."""

from __future__ import annotations

import signal
import time
from types import FrameType

from dsaccum.training.outcome import ExitCode, end_now

SAME_REQUEST_S = 5.0
"""Ctrl-C reaches a rank several times: from the terminal, and again through each launcher above it."""


class StopRequest:
    """Whether somebody asked this rank to stop."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._asked_at = 0.0

    @property
    def made(self) -> bool:
        """True once a signal has come."""
        return self.signal is not None

    def listen(self) -> StopRequest:
        """Handle SIGTERM and SIGINT from now on; main thread only."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._asked_at = signal.Signals(number), now
        elif now - self._asked_at > SAME_REQUEST_S:
            end_now(ExitCode.FAILED)
