"""What fits into memory, for a run with ``"train_micro_batch_size_per_gpu": "auto"``: found before, or planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsaccum.engine.process import Ranks
    from dsaccum.training.inputs import Inputs
    from dsaccum.training.micro_batch import Known


class PlannedSizing:
    """Remembers in the user's cache directory, and plans as ``dsaccum plan`` does.

    torch comes with each of these modules: they are not imported for ``--help``.
    """

    def remembered(self, inputs: Inputs) -> Known | None:
        """See ``Sizing``."""
        from dsaccum.sizing.kept import find

        return find(inputs)

    def free_bytes(self, ranks: Ranks) -> int:
        """See ``Sizing``."""
        from dsaccum.sizing.free_memory import plannable_bytes

        return plannable_bytes(ranks)

    def planned(self, inputs: Inputs, memory_bytes: int, moved: Callable[[], None]) -> Known:
        """See ``Sizing``."""
        from dsaccum.sizing.planned import largest_micro_batch

        return largest_micro_batch(inputs, memory_bytes, moved)

    def remember(self, inputs: Inputs, micro_batch: int) -> None:
        """See ``Sizing``."""
        from dsaccum.sizing.kept import keep

        keep(inputs, micro_batch)
