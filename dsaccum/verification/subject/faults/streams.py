"""A stream of windows with a change in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from dsaccum.verification.subject.loops import Windows

MicroBatch = dict[str, Tensor]
Change = Callable[[int, list[MicroBatch]], list[MicroBatch]]
"""(index of the window, its micro-batches on this rank) -> what the loop gets."""


class ChangedWindows:
    """The same windows, each changed on its way to the loop."""

    def __init__(self, windows: Windows, change: Change) -> None:
        self._windows, self._change = windows, change

    def __len__(self) -> int:
        return len(self._windows)

    def window(self, index: int) -> list[MicroBatch]:
        """This rank's N micro-batches."""
        return self._change(index, self._windows.window(index))

    def samples_in(self, index: int) -> int:
        """How many of their rows hold a sample."""
        return self._windows.samples_in(index)
