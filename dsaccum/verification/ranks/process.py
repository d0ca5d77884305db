"""A pool's hold on its ranks' processes: start them, look at them, end them without a trace."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import IO

from dsaccum.verification.ranks.messages import Place, Places, is_among_ranks
from dsaccum.verification.ranks.worker import LOOPBACK, STACK_SIGNAL, Seat

LAST_LINES = 20
"""How much of a rank's output a failure shows."""

_LAST_BYTES = 16 * 1024
_LONGEST_LAST_WORDS = 200
_KILLED_WITHIN_S = 10.0
# Not ``-m`` and not ``multiprocessing``: the owner's own script must not run again in its ranks.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]);"
    "from dsaccum.verification.ranks.worker import main_from_command_line; main_from_command_line()"
)


class RankProcess:
    """One rank.

    Args:
        seat: its place; the files behind ``channel`` and ``stacks`` are made here.
        places: where all ranks say how far they are.
        environment: of the process.
        verbose: its output goes to the terminal, rather than into a file that is read when it fails.
    """

    def __init__(self, seat: Seat, places: Places, environment: Mapping[str, str], *, verbose: bool) -> None:
        self.rank, self._places = seat.rank, places
        self._stacks: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed in kill)
        self._output: IO[bytes] | None = None if verbose else tempfile.TemporaryFile()  # noqa: SIM115
        ours, theirs = socket.socketpair()
        with theirs:
            seat = Seat(**{**asdict(seat), "channel": theirs.fileno(), "stacks": self._stacks.fileno()})
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-u",
                    "-c",
                    _PROGRAM,
                    json.dumps(asdict(seat)),
                    json.dumps([str(folder) for folder in sys.path]),
                ],
                env=environment,
                pass_fds=seat.file_descriptors,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                process_group=0,  # Ctrl-C is the owner's; and what a rank starts itself ends with it
            )
        self.channel = Connection(ours.detach())
        """To and from the rank."""

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def place(self) -> Place:
        """Where the rank stands."""
        return self._places.read(self.rank)

    def end(self) -> str | None:
        """How the process ended, as a clause ("was killed (signal 9)"); None while it lives."""
        code = self._process.poll()
        if code is None:
            return None
        return f"was killed (signal {-code})" if code < 0 else f"ended (exit code {code})"

    def last_lines(self) -> list[str]:
        """The end of its output; nothing where that goes to the terminal."""
        if self._output is None:
            return []
        lines = [line.rstrip() for line in _tail(self._output).splitlines()]
        return [line for line in lines if line][-LAST_LINES:]

    def last_words(self) -> str | None:
        """Its last line of output."""
        lines = self.last_lines()
        return lines[-1].strip()[:_LONGEST_LAST_WORDS] if lines else None

    def ask_for_stack(self) -> None:
        """Have it write down what its threads do; takes some milliseconds, until ``stack`` shows it."""
        if self.place.beats and self.end() is None:  # before, the signal would kill it
            os.kill(self.pid, STACK_SIGNAL)

    def stack(self) -> str:
        """What its threads did when they were asked; empty where it didn't answer."""
        return _tail(self._stacks)

    def waits_for_others(self) -> bool:
        """Whether its stack shows that it is among ranks, rather than at work of its own."""
        return any(is_among_ranks(frame) for frame in _innermost_frames(self.stack()))

    def kill(self) -> None:
        """End it and whatever it has started, and forget its output. A limited wait; harmless when repeated."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel holds it: nobody can do more
            self._process.wait(_KILLED_WITHIN_S)
        for file in (self._stacks, self._output):
            if file is not None:
                file.close()


def _occupy_standard_streams() -> None:
    """Where stdin was closed, as by some daemons, a file of ours would get its number, and lose it in the rank."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)


class Team:
    """Ranks that were started together and end together, for they share a process group.

    Args:
        world_size: number of ranks.
        threads_per_rank: for computing; None shares the cores out.
        verbose: see ``RankProcess``.
    """

    def __init__(self, world_size: int, threads_per_rank: int | None, *, verbose: bool) -> None:
        self.ready = False
        """Whether all ranks have joined."""
        self.tasks_done = 0
        """How many tasks it has done."""
        self.growth_bytes = 0
        """By how much the memory of its largest rank has grown, idle, since its start."""
        self.processes: list[RankProcess] = []
        _occupy_standard_streams()
        with tempfile.TemporaryFile() as file:
            Places.make_room(file.fileno(), world_size)
            self._places = Places(file.fileno(), world_size)
            try:
                self._start(world_size, threads_per_rank, file.fileno(), verbose=verbose)
            except BaseException:
                self.kill()
                raise

    def __iter__(self) -> Iterator[RankProcess]:
        return iter(self.processes)

    def __getitem__(self, rank: int) -> RankProcess:
        return self.processes[rank]

    def is_whole(self) -> bool:
        """Whether every rank lives."""
        return all(process.end() is None for process in self)

    def kill(self) -> None:
        """End all ranks; nothing of them stays."""
        for process in self:
            process.kill()
        self.processes = []
        self._places.close()

    def _start(self, world_size: int, threads_per_rank: int | None, places: int, *, verbose: bool) -> None:
        # Bound here and handed to rank 0, so that nobody else can take the port in between.
        with socket.create_server((LOOPBACK, 0)) as store:
            port = store.getsockname()[1]
            for rank in range(world_size):
                seat = Seat(
                    rank=rank,
                    world_size=world_size,
                    parent=os.getpid(),
                    owned_by_main_thread=threading.current_thread() is threading.main_thread(),
                    channel=-1,
                    places=places,
                    stacks=-1,
                    store=store.fileno() if rank == 0 else -1,
                    store_port=port,
                )
                environment = _environment(seat, threads_per_rank)
                self.processes.append(RankProcess(seat, self._places, environment, verbose=verbose))


def _environment(seat: Seat, threads_per_rank: int | None) -> dict[str, str]:
    environment = dict(
        os.environ,
        RANK=str(seat.rank),
        WORLD_SIZE=str(seat.world_size),
        LOCAL_RANK=str(seat.rank),
        LOCAL_WORLD_SIZE=str(seat.world_size),
        LOCAL_SIZE=str(seat.world_size),
        MASTER_ADDR=LOOPBACK,
        MASTER_PORT=str(seat.store_port),
    )
    if threads_per_rank is not None:
        environment["OMP_NUM_THREADS"] = str(threads_per_rank)
    return environment


def _tail(file: IO[bytes]) -> str:
    # The process writes at an offset that it shares with this file object: read without moving it.
    size = os.fstat(file.fileno()).st_size
    start = max(0, size - _LAST_BYTES)
    return os.pread(file.fileno(), size - start, start).decode(errors="replace")


def _innermost_frames(stack: str) -> Iterator[str]:
    """The first frame of each thread, as ``faulthandler`` writes them."""
    lines = stack.splitlines()
    for heading, frame in pairwise(lines):
        if heading.endswith("(most recent call first):"):
            yield frame
