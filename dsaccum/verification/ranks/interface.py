"""What a task and its owner rely on, whoever the ranks are: the processes of a pool, or those of a training run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, Protocol, TypeVar

from dsaccum.engine.process import Ranks

Result = TypeVar("Result")

OnMessage = Callable[[int, Any], None]
"""Told the rank and the object that its task sent."""


def ignore_message(rank: int, message: Any) -> None:
    """Nobody wants to know what a task sends."""


class RankContext(Protocol):
    """What a task has on its rank."""

    @property
    def ranks(self) -> Ranks:
        """This rank's place among the others."""

    def at(self, step: int, micro_step: int, phase: str) -> None:
        """This rank has come so far. Cheap enough for every phase of every micro-step.

        Args:
            step: from 1; 0 before the first.
            micro_step: from 1; 0 outside of one.
            phase: what it does there: "forward"; before the first step "building the model".
        """

    def send(self, message: Any) -> None:
        """Hand an object to the owner of the ranks; in order, from one thread."""


class TaskRunner(Protocol):
    """Has tasks done by ranks that it owns."""

    def run(
        self,
        task: Callable[Concatenate[RankContext, ...], Result],
        *arguments: Any,
        on_message: OnMessage = ignore_message,
    ) -> list[Result]:
        """Call ``task(context, *arguments)`` on every rank; returns what each returned, by rank.

        Args:
            task: a function of an importable module.
            arguments: picklable.
            on_message: called here, with the rank and the object, for each that a task sends.
        """
