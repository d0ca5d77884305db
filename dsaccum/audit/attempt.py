"""What a task on the ranks raises is an answer here: it comes back as a value, and the ranks stay."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dsaccum
from dsaccum.audit.loops import NoSuchApi
from dsaccum.config.errors import ConfigError
from dsaccum.verification.ranks.interface import OnMessage, RankContext, TaskRunner, ignore_message
from dsaccum.verification.subject.tasks import measure_memory_of

_OURS = Path(dsaccum.__file__).parent


@dataclass(frozen=True)
class Raised:
    """What a task raised on one rank.

    Attributes:
        line: the exception's type and the first line of its message.
        ours: the last word was ours: what DeepSpeed did could not be observed.
    """

    line: str
    ours: bool


class Refused(Exception):
    """DeepSpeed, or torch on its behalf, raised on at least one rank.

    Args:
        raised: of the first rank that did.
    """

    def __init__(self, raised: Raised) -> None:
        self.raised = raised
        super().__init__(raised.line)


class Attempts:
    """Stands for a pool: tasks that raise on all ranks leave it running.

    Args:
        pool: does the work.
    """

    def __init__(self, pool: TaskRunner) -> None:
        self._pool = pool

    def run(self, task: Callable[..., Any], *arguments: Any, on_message: OnMessage = ignore_message) -> list[Any]:
        """As ``RankPool.run``.

        Raises:
            Refused: the task raised on a rank.
            RankFailed: a rank died, or hangs: others may have raised.
        """
        results = self._pool.run(attempt, task, *arguments, on_message=on_message)
        raised = _first_raised(results)
        if raised is None:
            return results
        if raised.ours:  # what DeepSpeed says by itself: the same loop, with nobody looking at gradients
            raised = _first_raised(self._pool.run(attempt, measure_memory_of, *arguments)) or raised
        raise Refused(raised)


def _first_raised(results: list[Any]) -> Raised | None:
    return next((result for result in results if isinstance(result, Raised)), None)


def join(context: RankContext) -> None:
    """A task that does nothing: whether the ranks are there."""


def attempt(context: RankContext, task: Callable[..., Any], *arguments: Any) -> Any:
    """Do the task on this rank; ``Raised`` where it raises."""
    try:
        return task(context, *arguments)
    except Exception as error:
        return describe(error)


def describe(error: Exception) -> Raised:
    """What it says, and whose last word it was."""
    if isinstance(error, ConfigError) and error.__cause__ is not None:  # our word around DeepSpeed's, at the start
        return Raised(_line(error.__cause__), ours=False)
    if isinstance(error, NoSuchApi):
        return Raised(str(error), ours=False)
    innermost = traceback.extract_tb(error.__traceback__)[-1].filename
    return Raised(_line(error), ours=Path(innermost).is_relative_to(_OURS))


def _line(error: BaseException) -> str:
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
