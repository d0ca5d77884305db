"""What every engine of the model does: it is told of a micro-step's events, and keeps its ledger."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from dsaccum.planning.engines.layout import Layout
from dsaccum.planning.engines.ledger import Ledger


class Engine(ABC):
    """An engine that has made an optimizer step before, so that the optimizer's states exist.

    Args:
        layout: model and config.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout, self.ledger = layout, Ledger()
        self.ledger.take("parameters", layout.frozen * layout.weight_bytes)

    def begin(self, visits: Sequence[int], *, boundary: bool) -> None:
        """A micro-step begins.

        Args:
            visits: the modules that will be entered, in this order.
            boundary: the optimizer steps at its end.
        """
        self.boundary = boundary

    @abstractmethod
    def gradient(self, parameter: int) -> int:
        """A parameter's gradient is complete; the micro-step's own bytes hold it until this call returns.

        Returns:
            Bytes of it that stay where they are, and are the engine's from then on.
        """

    def enter(self, module: int) -> None:  # noqa: B027  (only ZeRO 3 does anything)
        """A module needs its parameters."""

    def leave(self, module: int) -> None:  # noqa: B027
        """It needs them no longer."""

    @abstractmethod
    def finish(self) -> None:
        """The backward pass has ended: what DeepSpeed does before ``engine.backward`` returns."""

    @abstractmethod
    def step(self) -> None:
        """The optimizer step at the boundary."""
