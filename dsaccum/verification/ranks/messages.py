"""What the pool and its ranks say to each other, through pipes and nameless files: nothing can stay behind on disk."""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import tempfile
from dataclasses import dataclass
from enum import IntEnum, auto
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import IO, Any, NamedTuple

from dsaccum.config.errors import ConfigError

LARGEST_IN_PIPE = 32 * 1024
"""Bytes; a pipe takes them at once, so that no sender waits for its reader. What is larger goes through a file."""

_PLACE = struct.Struct("<qqq40s")
_LONGEST_PHASE = 40
_EXCHANGES = ("/torch/distributed/", "/deepspeed/comm/", "/deepspeed/runtime/")


class Kind(IntEnum):
    """What a message is; all but the first are said by a rank."""

    TASK = auto()
    READY = auto()
    MESSAGE = auto()
    RESULT = auto()
    IDLE = auto()
    FAILED = auto()


class ChannelClosed(Exception):
    """The other side is gone."""


@dataclass(frozen=True)
class Failure:
    """An exception that ended a task, told to the pool.

    Attributes:
        what: type and message, in one line.
        traceback: as Python prints it.
        among_ranks: raised where ranks exchange tensors, hence perhaps by the failure of another rank.
        mistake: the exception itself where the user's input is wrong.
    """

    what: str
    traceback: str
    among_ranks: bool
    mistake: ConfigError | None


class Place(NamedTuple):
    """Where a rank stands in its task."""

    beats: int
    """How often it has moved; equal programs make equal beats, so the rank with fewer is behind."""
    step: int
    micro_step: int
    phase: str
    """A word ("forward"), or before the first step what the rank does ("building the model")."""

    @property
    def where(self) -> str:
        """The same as part of a sentence."""
        return f"at {self}" if self.step else f"while {self}"

    def __str__(self) -> str:
        if not self.step:
            return self.phase or "starting"
        micro_step = f", micro-step {self.micro_step}" if self.micro_step else ""
        return f"step {self.step}{micro_step}, {self.phase}"


class Places:
    """Where all ranks stand, in memory that they share with the pool; a write costs a microsecond and never waits.

    Args:
        file_descriptor: of the file behind the memory; see ``make_room``.
        world_size: number of ranks.
    """

    def __init__(self, file_descriptor: int, world_size: int) -> None:
        self._memory = mmap.mmap(file_descriptor, _PLACE.size * world_size)

    @staticmethod
    def make_room(file_descriptor: int, world_size: int) -> None:
        """Size a new file; every rank stands nowhere yet."""
        os.ftruncate(file_descriptor, _PLACE.size * world_size)

    def write(self, rank: int, place: Place) -> None:
        """Say where a rank stands. A reader may see half of it, but only of a rank that moves."""
        phase = place.phase.encode()[:_LONGEST_PHASE]
        _PLACE.pack_into(self._memory, rank * _PLACE.size, place.beats, place.step, place.micro_step, phase)

    def read(self, rank: int) -> Place:
        """Where a rank stands."""
        beats, step, micro_step, phase = _PLACE.unpack_from(self._memory, rank * _PLACE.size)
        return Place(beats, step, micro_step, phase.rstrip(b"\0").decode(errors="replace"))

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()


class Parcel:
    """A pickled object, ready to be sent to any number of receivers. Tensors travel as bytes, with their whole storage.

    Args:
        content: what to send.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: it cannot be pickled.
        OSError: there is no room for a large one in the folder of temporary files.
    """

    def __init__(self, content: Any) -> None:
        self._bytes = pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL)
        self._file: IO[bytes] | None = None
        if len(self._bytes) > LARGEST_IN_PIPE:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the parcel)
            self._file.write(self._bytes)
            self._file.flush()
            self._bytes = b""

    def send(self, channel: Connection, kind: Kind) -> None:
        """Send it; it can be sent again to others.

        Raises:
            ChannelClosed: the receiver is gone.
        """
        try:
            channel.send_bytes(bytes([kind, self._file is not None]) + self._bytes)
            if self._file is not None:
                reduction.send_handle(channel, self._file.fileno(), None)
        except OSError:
            raise ChannelClosed from None

    def __enter__(self) -> Parcel:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def tell(channel: Connection, kind: Kind, content: Any = None) -> None:
    """Send an object to one receiver; raises what ``Parcel`` and ``Parcel.send`` raise."""
    with Parcel(content) as parcel:
        parcel.send(channel, kind)


def receive(channel: Connection) -> tuple[Kind, Any]:
    """Wait for the next message: its kind and content.

    Raises:
        ChannelClosed: the sender is gone.
    """
    file = None
    try:
        frame = channel.recv_bytes()
        if frame[1]:
            file = reduction.recv_handle(channel)
    except (EOFError, OSError):
        raise ChannelClosed from None
    if file is None:
        return Kind(frame[0]), pickle.loads(memoryview(frame)[2:])
    try:
        # Several receivers share one file and its offset: memory has none.
        with mmap.mmap(file, 0, access=mmap.ACCESS_READ) as content:
            return Kind(frame[0]), pickle.loads(content)
    finally:
        os.close(file)


def is_among_ranks(source_file: str) -> bool:
    """Whether code of this file exchanges tensors between ranks, where a rank waits for the others."""
    return any(folder in source_file for folder in _EXCHANGES)
