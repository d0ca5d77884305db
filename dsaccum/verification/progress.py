"""How a verification tells what it is at; how that is shown is decided above."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told by ``verify`` as it works."""

    def stage(self, text: str) -> None:
        """A new stage starts, which ends the one before: ``"starting 2 ranks"``."""

    def detail(self, text: str) -> None:
        """Where in this stage it is: ``"step 2 of 3"``."""


class SilentProgress:
    """Says nothing."""

    def stage(self, text: str) -> None:
        """Nothing."""

    def detail(self, text: str) -> None:
        """Nothing."""
