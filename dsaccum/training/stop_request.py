"""A request to stop at the next boundary: by a signal, a time limit, or because nobody waits for this rank any more."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from types import FrameType

from dsaccum.training.outcome import ExitCode, end_now, say

SAME_REQUEST_S = 5.0
"""Ctrl-C reaches a rank several times: from the terminal, and again through each launcher above it."""


class StopRequest:
    """Whether somebody asked this rank to stop, and who."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.on_end: Callable[[str], None] = lambda _: None
        """Called with the reason when a second request ends this rank; whoever keeps the record puts it here."""
        self._asked_at = 0.0
        self._limit, self._limit_reason = math.inf, ""

    @property
    def made(self) -> bool:
        """True once somebody has asked, or the time is over."""
        if time.monotonic() > self._limit:
            self.ask(self._limit_reason)
        return self.reason is not None

    def limit(self, seconds: float, reason: str) -> None:
        """Ask by itself after so many seconds from now."""
        self._limit, self._limit_reason = time.monotonic() + seconds, reason

    def ask(self, reason: str) -> None:
        """Ask for a stop at the next boundary; the first reason is kept."""
        if self.reason is None:
            self.reason, self._asked_at = reason, time.monotonic()

    def listen(self) -> StopRequest:
        """Let SIGTERM, SIGINT and SIGUSR1 (as schedulers send) ask from now on; main thread only.

        Asking again, later, ends this rank at once.
        """
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.made and time.monotonic() - self._asked_at > SAME_REQUEST_S:
            self._end(f"ended at once by a second {name}")
        self.ask(name)

    def _end(self, reason: str) -> None:
        try:
            say(f"error: {reason}")
            self.on_end(reason)
        finally:
            end_now(ExitCode.FAILED)
