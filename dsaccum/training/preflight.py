"""What a run is asked before its first step; the floors above answer it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from dsaccum.engine.process import Ranks
    from dsaccum.training.inputs import Inputs
    from dsaccum.training.watchdog import Watchdog


class NotEquivalent(Exception):
    """Accumulation would be wrong: the run must not start. The message is the whole finding."""


class Preflight(Protocol):
    """Called on every rank, once the process group has started and before the run's engine is built."""

    def __call__(self, inputs: Inputs, ranks: Ranks, watchdog: Watchdog, note: Callable[[str], None]) -> dict[str, Any]:
        """Returns what ``run.json`` says of it (JSON types), the same on all ranks.

        Args:
            inputs: of the run.
            ranks: this process's place.
            watchdog: told that this rank moves.
            note: shows a line, on rank 0.

        Raises:
            NotEquivalent: on all ranks.
            ConfigError: DeepSpeed refuses the config.
        """
