"""Files that are on the disk when we say so, and that tell when they are no longer what was written."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import BaseModel, ConfigDict

CHUNK_BYTES = 1 << 24


class Written(BaseModel):
    """What a file held when it was written."""

    model_config = ConfigDict(frozen=True)

    bytes: int
    crc32: int


class DurableFile(io.RawIOBase):
    """A new file for writing. When it has been closed without an exception, its bytes have reached the disk.

    Args:
        path: what is there is replaced.
        moved: called after each piece: a slow disk is no hang.
    """

    def __init__(self, path: str | os.PathLike[str], moved: Callable[[], None] = lambda: None) -> None:
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115  (closed by close)
        self._moved, self._bytes, self._crc32 = moved, 0, 0
        self.error: OSError | None = None
        """What the system said; who writes through a library may get to hear another thing."""

    @property
    def written(self) -> Written:
        """So far."""
        return Written(bytes=self._bytes, crc32=self._crc32)

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, data: Any) -> int:
        """All of it, in pieces.

        Raises:
            OSError: the disk is full, say.
        """
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            piece = view[start : start + CHUNK_BYTES]
            done = 0
            while done < len(piece):
                done += self._write(piece[done:])
            self._crc32 = zlib.crc32(piece, self._crc32)
            self._moved()
        self._bytes += len(view)
        return len(view)

    def _write(self, piece: memoryview) -> int:
        try:
            return self._file.write(piece) or 0
        except OSError as error:
            self.error = self.error or error
            raise

    def close(self) -> None:
        """Close the file, without waiting for the disk."""
        if not self._file.closed:
            self._file.close()
        super().close()

    def __exit__(self, kind: type[BaseException] | None, *rest: BaseException | TracebackType | None) -> None:
        try:
            if kind is None:
                os.fsync(self._file.fileno())
                self._moved()
        finally:
            self.close()


def write_durably(path: Path, content: bytes) -> Written:
    """A small file."""
    with DurableFile(path) as file:
        file.write(content)
    return file.written


def make_durable(path: Path) -> None:
    """What was done to a file, or to a directory's entries, reaches the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_back(path: Path, moved: Callable[[], None] = lambda: None) -> Written:
    """What a file holds now.

    Raises:
        OSError: it cannot be read.
    """
    size = crc32 = 0
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            size, crc32 = size + len(piece), zlib.crc32(piece, crc32)
            moved()
    return Written(bytes=size, crc32=crc32)
