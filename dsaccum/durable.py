"""Files that are on the disk when we say so, and that tell when they are no longer what was written."""

from __future__ import annotations

import contextlib
import io
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import BaseModel, ConfigDict

from dsaccum.checksum import Checksum, ZipChecksum, joined

BUFFER_BYTES = 1 << 16
"""Archives are written in very small pieces between large ones."""
CHUNK_BYTES = 1 << 23
"""What the disk is given at once, at least."""
BEHIND_BYTES = 1 << 28
"""So far may the disk be behind: what is left to wait for at the end is no more."""
PART_BYTES, READ_BYTES = 1 << 24, 1 << 20
"""What a thread reads, and in which pieces: they stay in the CPU's cache."""
READERS = min(4, os.cpu_count() or 1)


class Written(BaseModel):
    """What a file held when it was written."""

    model_config = ConfigDict(frozen=True)

    bytes: int
    crc32: int


class DurableFile(io.RawIOBase):
    """A new file for writing. When it has been closed without an exception, its bytes have reached the disk.

    The disk begins at once, so that it writes while more is computed, and little is left to wait for.

    Args:
        path: what is there is replaced.
        moved: called after each piece: a slow disk is no hang.
        zipped: it will be an archive of torch's, whose records tell their checksums.
    """

    def __init__(
        self, path: str | os.PathLike[str], moved: Callable[[], None] = lambda: None, *, zipped: bool = False
    ) -> None:
        self._file = open(path, "wb", buffering=BUFFER_BYTES)  # noqa: SIM115  (closed by close)
        self._path, self._moved, self._bytes, self._begun = Path(path), moved, 0, 0
        self._disk, self._flush = ThreadPoolExecutor(1), Future[None]()  # its thread begins with the first large piece
        self._flush.set_result(None)
        self._checksum = ZipChecksum(self._read_again) if zipped else Checksum()
        self.error: OSError | None = None
        """What the system said; who writes through a library may get to hear another thing."""

    @property
    def written(self) -> Written:
        """So far."""
        return Written(bytes=self._bytes, crc32=self._checksum.crc32)

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, data: Any) -> int:
        """All of it, in pieces.

        Raises:
            OSError: the disk is full, say.
        """
        view = memoryview(data).cast("B")
        self._checksum.add(view)
        for start in range(0, len(view), CHUNK_BYTES):
            piece = view[start : start + CHUNK_BYTES]
            with self._noted():
                self._file.write(piece)
                self._bytes += len(piece)
                self._begin()
            self._moved()  # also where it took the disk long
        return len(view)

    def reach_disk(self) -> None:
        """Wait until all that was written has.

        Raises:
            OSError: the disk refuses.
        """
        with self._noted():
            self._file.flush()
            self._flush.result()
            self._moved()
            os.fsync(self._file.fileno())
            self._moved()

    def close(self) -> None:
        """Close the file, without waiting for the disk."""
        self._disk.shutdown()
        with contextlib.suppress(OSError):  # what could not be written has been said when it was
            self._file.close()
        super().close()

    def __exit__(self, kind: type[BaseException] | None, *rest: BaseException | TracebackType | None) -> None:
        try:
            if kind is None:
                self.reach_disk()
        finally:
            self.close()

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = self.error or error
            raise

    def _begin(self) -> None:
        """Let the disk write what has come together, unless it is still busy with what came before."""
        waiting = self._bytes - self._begun
        if waiting >= BEHIND_BYTES or (waiting >= CHUNK_BYTES and self._flush.done()):
            self._flush.result()
            self._flush, self._begun = self._disk.submit(os.fdatasync, self._file.fileno()), self._bytes
            self._moved()

    def _read_again(self, count: int) -> int:
        if not self._file.closed:
            self._file.flush()
        with self._path.open("rb") as file:
            return _crc32_in(file.fileno(), self._bytes - count, count)[1]


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
    """What a file holds now; several threads read it, as computing a checksum takes longer than reading.

    Raises:
        OSError: it cannot be read.
    """
    size = crc32 = 0
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(READERS) as pool:
        starts = range(0, os.fstat(file.fileno()).st_size, PART_BYTES)
        for count, of_part in pool.map(lambda start: _crc32_in(file.fileno(), start, PART_BYTES), starts):
            size, crc32 = size + count, joined(crc32, of_part, count)
            moved()
    return Written(bytes=size, crc32=crc32)


def _crc32_in(handle: int, start: int, count: int) -> tuple[int, int]:
    """Of so many bytes of an open file, or as many as there are; and how many that was."""
    crc32, at, end = 0, start, start + count
    buffer = memoryview(bytearray(min(count, READ_BYTES)))
    while at < end and (got := os.preadv(handle, [buffer[: end - at]], at)):
        crc32, at = zlib.crc32(buffer[:got], crc32), at + got
    return at - start, crc32
