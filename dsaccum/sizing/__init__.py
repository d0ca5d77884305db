"""Where the micro-batch of a run with ``"train_micro_batch_size_per_gpu": "auto"`` starts: found before, or planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsaccum.engine.process import Ranks
    from dsaccum.training.inputs import Inputs


class PlannedSizing:
    """Remembers in the user's cache directory; else plans with the memory that the fullest rank has free."""

    def start(self, inputs: Inputs, ranks: Ranks, moved: Callable[[], None]) -> tuple[int, str]:
        """B, a divisor of E / W, and why. A collective."""
        from dsaccum.sizing.start import first_micro_batch  # torch comes with it: not for --help

        return first_micro_batch(inputs, ranks, moved)

    def remember(self, inputs: Inputs, micro_batch: int) -> None:
        """For the next start."""
        from dsaccum.sizing.kept import keep

        keep(inputs, micro_batch)
