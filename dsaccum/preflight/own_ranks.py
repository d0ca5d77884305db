"""The ranks of the run itself do the verification's tasks: no process is started, and what is patched is verified."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Concatenate

import torch.distributed as dist

from dsaccum.engine.process import Ranks
from dsaccum.preflight.undisturbed import undisturbed
from dsaccum.training.failure import is_communication
from dsaccum.training.outcome import RunFailed
from dsaccum.verification.ranks.interface import OnMessage, RankContext, Result, ignore_message

_LOOK_S = 0.01
_SETTLE_S = 10.0
"""After one rank has raised, for the others to do so, too, or to be done."""


class TaskRaised(Exception):
    """A task raised on every rank; its cause is what it raised here."""


class OwnContext:
    """What a task has on its rank: a ``RankContext`` that keeps its messages until the task is done.

    Args:
        ranks: this process's place.
        moved: called whenever the task has come further.
    """

    def __init__(self, ranks: Ranks, moved: Callable[[], None]) -> None:
        self.ranks, self._moved = ranks, moved
        self.messages: list[Any] = []

    def at(self, step: int, micro_step: int, phase: str) -> None:
        """This rank has come so far."""
        self._moved()

    def send(self, message: Any) -> None:
        """Hand an object to rank 0."""
        self.messages.append(message)


class OwnRanks:
    """A ``TaskRunner`` on rank 0; the other ranks ``follow``. Nobody waits in a collective while rank 0 computes.

    A task that raises on every rank is done, with ``TaskRaised``. One that raises on some alone ends the run, as a step
    of training would: the others may be inside a collective.

    Args:
        ranks: this process's place.
        report: told that this rank moves, and how far its tasks have come: the rank that has come least far hangs.
    """

    def __init__(self, ranks: Ranks, report: Callable[[int], None]) -> None:
        self._ranks, self._report = ranks, report
        self._come = 0
        self._store = dist.distributed_c10d._get_default_store()
        self._calls = 0

    def run(
        self,
        task: Callable[Concatenate[RankContext, ...], Result],
        *arguments: Any,
        on_message: OnMessage = ignore_message,
    ) -> list[Result]:
        """As ``TaskRunner``; on rank 0."""
        self._exchange((task, arguments))
        told = self._do(task, arguments)
        for rank, (_, messages) in enumerate(told):
            for message in messages:
                on_message(rank, message)
        return [result for result, _ in told]

    def moved(self) -> None:
        """This rank is at work, or waits for rank 0 rather than hang."""
        self._report(self._come)

    def dismiss(self, last_word: Any) -> None:
        """Let the others go on; ``follow`` gives them the last word. On rank 0."""
        self._exchange(last_word)

    def follow(self) -> Any:
        """Do what rank 0 wants done; returns its last word. On the other ranks."""
        while True:
            self._wait_for_first()
            said = self._exchange(None)
            if not isinstance(said, tuple):
                return said
            with undisturbed(), contextlib.suppress(TaskRaised):
                self._do(*said)

    def _exchange(self, said: Any) -> Any:
        """What rank 0 says, on all ranks."""
        self._calls += 1
        box = [said]
        if self._ranks.world_size > 1:
            if self._ranks.is_first:
                self._store.set(self._key(self._calls), "1")
            dist.broadcast_object_list(box)
        self.moved()
        return box[0]

    def _wait_for_first(self) -> None:
        """No hang: rank 0's own watchdog ends it where it does not come on, and then its store is gone."""
        while not self._store.check([self._key(self._calls + 1)]):
            self.moved()
            time.sleep(_LOOK_S)

    def _do(self, task: Callable[..., Any], arguments: tuple[Any, ...]) -> list[tuple[Any, list[Any]]]:
        """Each rank's result and messages, on rank 0; nothing on others."""
        context = OwnContext(self._ranks, self._moved_in_task)
        result, raised = None, None
        try:
            result = task(context, *arguments)
        except Exception as error:
            if is_communication(error):
                raise
            raised = error
        self._agree(raised)
        if raised is not None:
            raise TaskRaised from raised
        mine = (result, context.messages)
        if self._ranks.world_size == 1:
            return [mine]
        told: list[Any] | None = [None] * self._ranks.world_size if self._ranks.is_first else None
        dist.gather_object(mine, told)
        self.moved()
        return told or []

    def _agree(self, raised: Exception | None) -> None:
        """Wait until every rank is done with the task; all of them, or none, must have raised.

        Raises:
            RunFailed: another rank raised.
        """
        everywhere = [f"{self._key(self._calls)}/{rank}" for rank in range(self._ranks.world_size)]
        self._store.set(everywhere[self._ranks.rank], "raised" if raised else "done")
        heard_at: float | None = None
        while True:
            said = [self._store.get(key) for key in everywhere if self._store.check([key])]
            if b"raised" in said:
                heard_at = heard_at or time.monotonic()
            if len(said) == len(everywhere) or (heard_at is not None and time.monotonic() - heard_at > _SETTLE_S):
                break
            self.moved()
            time.sleep(_LOOK_S)
        if (b"raised" in said and set(said) != {b"raised"}) or len(said) < len(everywhere):
            raise raised or RunFailed("another rank failed in the preflight")

    def _moved_in_task(self) -> None:
        self._come += 1
        self.moved()

    @staticmethod
    def _key(call: int) -> str:
        return f"dsaccum/preflight/{call}"
