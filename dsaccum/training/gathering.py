"""Ranks wait for one another without a collective, which would give up on one that is slow and moves."""

from __future__ import annotations

import itertools
import time
from typing import Any

from dsaccum.engine.process import Ranks
from dsaccum.training.notice_board import NoticeBoard
from dsaccum.training.watchdog import Watchdog

SHORTEST_S, LONGEST_S = 0.005, 0.5
"""Between two looks; they become rarer."""


class Gathering:
    """Where ranks meet after work that takes one of them longer than the others, such as writing files.

    Args:
        ranks: this process's place.
        watchdog: kept from ending this rank while another one that is still to come moves.
        store: of the process group.
    """

    def __init__(self, ranks: Ranks, watchdog: Watchdog, store: Any) -> None:
        self._ranks, self._watchdog, self._board = ranks, watchdog, NoticeBoard(store)
        self._count = itertools.count()

    def wait(self) -> None:
        """Until all ranks have come; called by all of them, equally often.

        Where rank 0 is gone, and the board with it, this returns: the collective that comes next fails by itself.
        """
        meeting, pause = next(self._count), SHORTEST_S
        names = [f"dsaccum/there/{meeting}/{rank}" for rank in range(self._ranks.world_size)]
        self._watchdog.waits()
        self._board.write(names[self._ranks.rank], "here")
        before = None
        while (there := self._board.read(names)) is not None and None in there:
            moves = self._watchdog.moves_of([rank for rank, word in enumerate(there) if word is None], self._board)
            if before is not None and moves != before:
                self._watchdog.moved()
            before = moves
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_S)
