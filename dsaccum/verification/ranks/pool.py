"""W ranks, started once and used for many tasks: real collectives, a limit to every wait, nothing left behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Concatenate

from dsaccum.verification.ranks.failed import RankFailed
from dsaccum.verification.ranks.interface import OnMessage, RankContext, Result, ignore_message
from dsaccum.verification.ranks.messages import ChannelClosed, Kind, Parcel
from dsaccum.verification.ranks.process import Team
from dsaccum.verification.ranks.watch import watch

__all__ = ["RankFailed", "RankPool"]

MOST_GROWTH_BYTES = 1_500_000_000
"""Ranks are replaced beyond this: DeepSpeed engines leak even after ``destroy``."""
MOST_TASKS = 100
"""Ranks are replaced after as many tasks, each of which makes an engine."""


class RankPool:
    """Processes that have joined one process group through DeepSpeed (gloo on CPUs, NCCL on GPUs), on this machine.

    Args:
        world_size: number of ranks, W.
        timeout_s: longest time in which no rank moves (``RankContext.at``, a message, its end) while a task runs.
        start_timeout_s: the same while the ranks start.
        threads_per_rank: for computing; None shares this machine's cores among the ranks.
        verbose: the ranks' output goes to the terminal, rather than into ``RankFailed.details`` when one fails.
    """

    def __init__(
        self,
        world_size: int,
        *,
        timeout_s: float = 60.0,
        start_timeout_s: float = 120.0,
        threads_per_rank: int | None = None,
        verbose: bool = False,
    ) -> None:
        self.world_size = world_size
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._threads_per_rank, self._verbose = threads_per_rank, verbose
        self._team: Team | None = None

    def start(self) -> RankPool:
        """Start the ranks unless they are there; they import their libraries while the caller goes on."""
        self._started_team()
        return self

    def run(
        self,
        task: Callable[Concatenate[RankContext, ...], Result],
        *arguments: Any,
        on_message: OnMessage = ignore_message,
    ) -> list[Result]:
        """Call ``task(context, *arguments)`` on every rank; returns what each returned, by rank.

        Whatever goes wrong, all ranks are ended, and the next call starts new ones.

        Args:
            task: a function of an importable module.
            arguments: picklable; tensors are copied as bytes, each with its whole storage.
            on_message: called here, with the rank and the object, for each that a task sends.

        Raises:
            ConfigError: as a task raised it on any rank.
            RankFailed: a task raised anything else, a rank died, or it hangs.
            ValueError: the task's module cannot be imported by the ranks.
        """
        if task.__module__ == "__main__":
            raise ValueError(f"{task.__qualname__} must stand in a module that the ranks can import")
        try:
            with Parcel((task, arguments)) as parcel:
                return self._run(parcel, on_message)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the ranks. A later ``run`` starts new ones."""
        if self._team is not None:
            self._team.kill()
            self._team = None

    def __enter__(self) -> RankPool:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, parcel: Parcel, on_message: OnMessage) -> list[Any]:
        team = self._joined_team()
        for process in team:
            with contextlib.suppress(ChannelClosed):  # the watch says how it ended
                parcel.send(process.channel, Kind.TASK)
        said = watch(team, Kind.IDLE, self._timeout_s, on_message)
        team.tasks_done += 1
        team.growth_bytes = max(said[Kind.IDLE].values())
        return [said[Kind.RESULT][rank] for rank in range(self.world_size)]

    def _joined_team(self) -> Team:
        if self._team is not None and self._team.ready and (_is_worn(self._team) or not self._team.is_whole()):
            self.close()
        team = self._started_team()
        if not team.ready:
            watch(team, Kind.READY, self._start_timeout_s, ignore_message)
            team.ready = True
        return team

    def _started_team(self) -> Team:
        if self._team is None:
            self._team = Team(self.world_size, self._threads_per_rank, verbose=self._verbose)
        return self._team


def _is_worn(team: Team) -> bool:
    return team.tasks_done >= MOST_TASKS or team.growth_bytes > MOST_GROWTH_BYTES
