"""While ranks work, somebody watches: who died, who raised, who hangs, and which of them was first."""

from __future__ import annotations

import time
from multiprocessing.connection import wait
from typing import Any

from dsaccum.verification.ranks.failed import RankFailed
from dsaccum.verification.ranks.interface import OnMessage
from dsaccum.verification.ranks.messages import ChannelClosed, Failure, Kind, receive
from dsaccum.verification.ranks.process import RankProcess, Team

_LOOK_S = 0.1
_LONGEST_LOOK_S = 1.0
"""What is counted between two looks at the most: a watcher that was away itself knows nothing of that time."""
_SETTLE_S = 0.5
"""After a first failure, for others that came at the same time: the first to be seen need not be the cause."""
_STACK_S = 0.3


def watch(team: Team, until: Kind, limit_s: float, on_message: OnMessage) -> dict[Kind, dict[int, Any]]:
    """Wait until every rank has said so; returns all that was said, by kind and rank, but for messages.

    Args:
        team: the ranks.
        until: the last that each says.
        limit_s: longest time in which none of the unfinished ranks moves.
        on_message: called for each message of a task.

    Raises:
        ConfigError: as a rank raised it.
        RankFailed: a rank raised anything else, died, or hangs.
    """
    return _Watch(team, until, limit_s, on_message).wait()


class _Watch:
    def __init__(self, team: Team, until: Kind, limit_s: float, on_message: OnMessage) -> None:
        self._team, self._until, self._limit_s, self._on_message = team, until, limit_s, on_message
        self._said: dict[Kind, dict[int, Any]] = {kind: {} for kind in Kind}
        self._places = {process.rank: process.place for process in team}
        self._silent_s = dict.fromkeys(self._places, 0.0)
        self._looked = time.monotonic()
        self._channels = {process.channel: process for process in team}

    def wait(self) -> dict[Kind, dict[int, Any]]:
        while unfinished := self._unfinished():
            self._look()
            if self._said[Kind.FAILED] or not self._team.is_whole():
                self._settle()
                raise self._failure()
            if min(self._silent_s[process.rank] for process in unfinished) >= self._limit_s:
                raise self._hang(unfinished)
        return self._said

    def _unfinished(self) -> list[RankProcess]:
        return [process for process in self._team if process.rank not in self._said[self._until]]

    def _look(self) -> None:
        """Take in what ranks have said, for a moment at the most, and who has moved."""
        for channel in wait(list(self._channels), _LOOK_S):
            self._take_in(self._channels[channel])  # type: ignore[index]  # what went in comes out
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, _LONGEST_LOOK_S), now
        for process in self._team:
            before, self._places[process.rank] = self._places[process.rank], process.place
            self._silent_s[process.rank] += passed
            if process.place != before:
                self._silent_s[process.rank] = 0.0

    def _take_in(self, process: RankProcess) -> None:
        try:
            kind, content = receive(process.channel)
        except ChannelClosed:  # its death shows at the next look
            del self._channels[process.channel]
            return
        self._silent_s[process.rank] = 0.0
        if kind is Kind.MESSAGE:
            self._on_message(process.rank, content)
        else:
            self._said[kind][process.rank] = content

    def _settle(self) -> None:
        end = time.monotonic() + _SETTLE_S
        while time.monotonic() < end:
            self._look()
            time.sleep(_SETTLE_S / 10)

    def _failure(self) -> Exception:
        """Of all that went wrong, the cause: the input, then a death, then an exception not brought by another rank."""
        failures: dict[int, Failure] = self._said[Kind.FAILED]
        for failure in failures.values():
            if failure.mistake is not None:
                return failure.mistake
        for process in self._team:
            if (end := process.end()) is not None:
                return _death(process, end)
        rank = min(failures, key=lambda rank: failures[rank].among_ranks)
        return _exception(self._team[rank], failures[rank])

    def _hang(self, unfinished: list[RankProcess]) -> RankFailed:
        for process in self._team:
            process.ask_for_stack()
        time.sleep(_STACK_S)
        blamed = min(unfinished, key=self._suspicion)
        others = "".join(f"; {self._describe(process)}" for process in self._team if process is not blamed)
        line = f"rank {blamed.rank} hangs {blamed.place.where}: no rank moved for {self._limit_s:g} s{others}"
        stacks = [f"rank {process.rank} {process.place.where}:\n{process.stack()}" for process in self._team]
        return RankFailed(blamed.rank, str(blamed.place), line, "\n".join([*stacks, *_output(blamed)]))

    def _suspicion(self, process: RankProcess) -> tuple[bool, int, int, int, float]:
        """Smallest for the one to blame: not waiting for others, furthest behind, longest silent."""
        place = process.place
        return process.waits_for_others(), place.step, place.micro_step, place.beats, -self._silent_s[process.rank]

    def _describe(self, process: RankProcess) -> str:
        if process.rank in self._said[self._until]:
            return f"rank {process.rank} is done"
        return f"rank {process.rank} {'waits' if process.waits_for_others() else 'stands'} {process.place.where}"


def _death(process: RankProcess, end: str) -> RankFailed:
    words = process.last_words()
    line = f"rank {process.rank} {end} {process.place.where}" + (f"; its last words: {words}" if words else "")
    return RankFailed(process.rank, str(process.place), line, "\n".join(_output(process)))


def _exception(process: RankProcess, failure: Failure) -> RankFailed:
    line = f"rank {process.rank} failed {process.place.where}: {failure.what}"
    return RankFailed(process.rank, str(process.place), line, "\n".join([failure.traceback, *_output(process)]))


def _output(process: RankProcess) -> list[str]:
    lines = process.last_lines()
    return [f"last output of rank {process.rank}:", *lines] if lines else []
