"""What a task's failure is to whoever asked for it; a module of its own, that torch is not loaded to name it."""

from __future__ import annotations


class RankFailed(Exception):
    """A task could not be carried out; the message is one line: which rank, where, what happened, its last words.

    Args:
        rank: the one to blame.
        place: where it stood ("step 2, micro-step 3, forward").
        line: the message.
        details: traceback or stacks, and its last lines of output; for those who want to see more.
    """

    def __init__(self, rank: int, place: str, line: str, details: str) -> None:
        self.rank, self.place, self.details = rank, place, details
        super().__init__(" ".join(line.split()))
