"""Where ranks leave word for one another. It stands on rank 0, perhaps at the other end of a wire that is cut."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

LIMIT_S = 5.0


class NoticeBoard:
    """torch's store, of which no call lasts longer than ``LIMIT_S``: the store itself would wait for minutes.

    Args:
        store: of the process group.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._unanswered: threading.Thread | None = None

    def write(self, key: str, text: str) -> None:
        """Leave word; nobody may be there to read it."""
        self._within_limit(lambda: self._store.set(key, text))

    def read(self, keys: Sequence[str]) -> list[str | None] | None:
        """What stands under each; None in place of all where the board can't be reached."""
        found: list[str | None] = []

        def look() -> None:
            for key in keys:
                found.append(self._store.get(key).decode() if self._store.check([key]) else None)

        return found if self._within_limit(look) else None

    def _within_limit(self, call: Callable[[], Any]) -> bool:
        """Whether it was carried out. While one call is unanswered, no other is made."""
        if self._unanswered is not None and self._unanswered.is_alive():
            return False
        done: list[bool] = []

        def carry_out() -> None:
            try:
                call()
                done.append(True)
            except (RuntimeError, ValueError):  # rank 0 has ended
                return

        self._unanswered = threading.Thread(target=carry_out, name="notice board", daemon=True)
        self._unanswered.start()
        self._unanswered.join(LIMIT_S)
        return bool(done)
