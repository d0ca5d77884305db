"""One rank of a pool: a process that joins the others once and then does one task after another until it is killed."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import pickle
import select
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from dsaccum.config.errors import ConfigError
from dsaccum.config.factories import forget_factories, place_of
from dsaccum.engine.process import Ranks, limit_threads, quiet_libraries, start_process_group
from dsaccum.verification.ranks.messages import (
    ChannelClosed,
    Failure,
    Kind,
    Place,
    Places,
    is_among_ranks,
    receive,
    tell,
)

STACK_SIGNAL = signal.SIGUSR1
"""Asks a rank for its stack, which C code writes: it answers whatever Python does."""
LOOPBACK = "127.0.0.1"

_LIBRARIES = ("torch.distributed", "deepspeed", "transformers.modeling_utils")
"""What every task needs; seconds, spent while the pool's owner prepares the first one."""
_WITHOUT_LIMIT = timedelta(days=7)
"""For collectives: the pool watches over them, and it knows which rank is to blame."""
_LOOK_FOR_PARENT_MS = 500
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Seat:
    """A rank's place in its pool: numbers, because they travel on a command line.

    Attributes:
        rank: from 0.
        world_size: number of ranks.
        parent: process id of the pool's owner.
        owned_by_main_thread: whether the owner's main thread started it.
        channel: file descriptor of the pipe to the pool.
        places: of the memory with all ranks' places.
        stacks: of the file for this rank's stack.
        store: of the socket that listens for all ranks, on rank 0; -1 on others.
        store_port: its port.
    """

    rank: int
    world_size: int
    parent: int
    owned_by_main_thread: bool
    channel: int
    places: int
    stacks: int
    store: int
    store_port: int

    @property
    def file_descriptors(self) -> list[int]:
        """What the process inherits."""
        return [file for file in (self.channel, self.places, self.stacks, self.store) if file >= 0]


class PoolContext:
    """What a task has on its rank of a pool: a ``RankContext``.

    Args:
        ranks: this rank's place among the others.
        channel: to the pool.
        places: where it says how far it is.
    """

    def __init__(self, ranks: Ranks, channel: Connection, places: Places) -> None:
        self.ranks = ranks
        self._channel, self._places, self._beats = channel, places, 0

    def at(self, step: int, micro_step: int, phase: str) -> None:
        """This rank has come so far."""
        self._beats += 1
        self._places.write(self.ranks.rank, Place(self._beats, step, micro_step, phase))

    def start_over(self) -> None:
        """Stand at the start of a task, as all ranks do."""
        self._beats = 0
        self.at(0, 0, "setting up")

    def send(self, message: Any) -> None:
        """Hand an object to the pool's owner while the task runs."""
        tell(self._channel, Kind.MESSAGE, message)


def main(seat: Seat) -> NoReturn:
    """Join the other ranks, then do tasks until the pool or its owner ends this process.

    Args:
        seat: this process's place.
    """
    for file in seat.file_descriptors:
        os.set_inheritable(file, False)
    faulthandler.register(STACK_SIGNAL, file=seat.stacks, all_threads=True)
    channel = Connection(seat.channel)
    _end_with_parent(seat, channel)
    ranks = Ranks(seat.rank, seat.world_size, seat.rank, seat.world_size, launched=False)
    context = PoolContext(ranks, channel, Places(seat.places, seat.world_size))
    with contextlib.suppress(ChannelClosed):
        try:
            growth = _join(seat, context)
            tell(channel, Kind.READY)
            while True:
                _do_next_task(context, channel, growth)
        except ChannelClosed:
            raise
        except BaseException as error:  # SystemExit of a user's model, too: the pool decides what becomes of it
            tell(channel, Kind.FAILED, _failure(error))
    # A rank that leaves would make its peers fail, too, and hide who was first.
    threading.Event().wait()
    raise AssertionError("the pool ends this process")


def main_from_command_line() -> NoReturn:
    """The program of the process: its seat as JSON in the first argument."""
    main(Seat(**json.loads(sys.argv[1])))


class _Growth:
    """Resident memory since the rank was idle first."""

    def __init__(self) -> None:
        import psutil

        gc.collect()
        gc.freeze()  # libraries stay: later collections look at what tasks made only
        self._process = psutil.Process()
        self._at_first = self._process.memory_info().rss

    def measure(self) -> int:
        gc.collect()
        return self._process.memory_info().rss - self._at_first


def _join(seat: Seat, context: PoolContext) -> _Growth:
    context.at(0, 0, "importing its libraries")
    quiet_libraries()
    for library in _LIBRARIES:
        importlib.import_module(library)
    limit_threads(context.ranks)
    context.at(0, 0, "joining the other ranks")
    _start_process_group(seat, context.ranks)
    return _Growth()


def _start_process_group(seat: Seat, ranks: Ranks) -> None:
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cuda" and accelerator.device_count() < ranks.world_size:
        raise ConfigError(
            f"{ranks.world_size} ranks need as many GPUs, and this machine shows {accelerator.device_count()}",
            fix=f"--ranks {accelerator.device_count()}, or DS_ACCELERATOR=cpu for ranks on the CPU",
        )
    accelerator.set_device(ranks.local_rank)
    store = dist.TCPStore(
        LOOPBACK,
        seat.store_port,
        ranks.world_size,
        is_master=ranks.is_first,
        timeout=_WITHOUT_LIMIT,
        wait_for_workers=False,
        master_listen_fd=seat.store if ranks.is_first else None,
    )
    backend = accelerator.communication_backend_name()
    dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world_size, timeout=_WITHOUT_LIMIT)
    start_process_group(ranks, _WITHOUT_LIMIT)


def _do_next_task(context: PoolContext, channel: Connection, growth: _Growth) -> None:
    _, (task, arguments) = receive(channel)
    context.start_over()
    forget_factories()  # a task finds them as a process of its own would
    tell(channel, Kind.RESULT, task(context, *arguments))
    del task, arguments  # their memory is no growth
    tell(channel, Kind.IDLE, growth.measure())


def _failure(error: BaseException) -> Failure:
    frames = traceback.extract_tb(error.__traceback__)
    return Failure(
        what=": ".join(part for part in (type(error).__name__, " ".join(str(error).split())) if part) + place_of(error),
        traceback="".join(traceback.format_exception(error)),
        among_ranks=bool(frames) and is_among_ranks(frames[-1].filename),
        mistake=_portable(error) if isinstance(error, ConfigError) else None,
    )


def _portable(mistake: ConfigError) -> ConfigError:
    try:
        pickle.loads(pickle.dumps(mistake))
    except Exception:  # the offending value may be anything
        return ConfigError(str(mistake))
    return mistake


def _end_with_parent(seat: Seat, channel: Connection) -> None:
    """End this process, and what it started, when the pool's owner is gone: also while a collective waits."""
    threading.Thread(target=_wait_for_end_of_parent, args=(seat.parent, channel.fileno()), daemon=True).start()
    # The kernel ends it even if some C code never gives Python's lock back. It means the owner's thread, though.
    if sys.platform == "linux" and seat.owned_by_main_thread:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_for_end_of_parent(parent: int, channel: int) -> None:
    poller = select.poll()
    poller.register(channel, 0)  # reports the hang-up, and leaves messages to the reader
    while os.getppid() == parent and not poller.poll(_LOOK_FOR_PARENT_MS):
        pass
    os.killpg(os.getpid(), signal.SIGKILL)
