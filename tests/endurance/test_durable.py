"""Files that reach the disk: their checksums, what the disk says, and how far it may be behind.

Run: pytest tests/endurance/test_durable.py. A failing disk is played by system calls that fail. Not covered: power
failures, and file systems that lie about fsync.
"""

from __future__ import annotations

import errno
import os
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dsaccum import durable
from dsaccum.checksum import LARGE_BYTES, ZipChecksum, joined
from dsaccum.durable import CHUNK_BYTES, DurableFile, Written, read_back
from dsaccum.engine.state_files import AT_ONCE, StateFiles

STATES = {
    "small": {"x": torch.arange(1000)},
    "large": {"x": torch.randn(3 * CHUNK_BYTES // 4), "y": torch.randn(10), "z": torch.randn(LARGE_BYTES // 4)},
    "views of one": [torch.zeros(LARGE_BYTES), torch.zeros(0)] * 2,
    "halves": torch.randn(LARGE_BYTES).bfloat16(),
}


def content_of(path: Path) -> Written:
    content = path.read_bytes()
    return Written(bytes=len(content), crc32=zlib.crc32(content))


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_knows_what_was_written(tmp_path: Path, name: str, zipped: bool) -> None:
    path = tmp_path / "a.pt"
    moved: list[int] = []
    with DurableFile(path, lambda: moved.append(1), zipped=zipped) as file:
        torch.save(STATES[name], file)
    assert file.written == content_of(path) == read_back(path)
    assert moved
    assert zipfile.ZipFile(path).testzip() is None, "it is the archive that torch writes"
    with path.open("r+b") as changed:
        changed.seek(path.stat().st_size // 2)
        (byte,) = changed.read(1)
        changed.seek(-1, os.SEEK_CUR)
        changed.write(bytes([byte ^ 1]))
    assert file.written != read_back(path), "one bit is enough"


def test_large_records_are_not_gone_over_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DurableFile, "_read_again", lambda *_: pytest.fail("torch has told it"))
    files = StateFiles()
    files.save(STATES["large"], tmp_path / "a.pt")
    files.reach_disk()
    assert files.error is None
    assert files.written == {tmp_path / "a.pt": content_of(tmp_path / "a.pt")}


def test_where_torch_tells_no_checksums_they_are_computed(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        files = StateFiles()
        files.save(STATES["large"], tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    files.reach_disk()
    assert files.written == {tmp_path / "a.pt": content_of(tmp_path / "a.pt")}


@pytest.mark.parametrize("follows", [b"", b"x", b"PK\x07\x08" + bytes(12), b"PK\x07\x08" + bytes(20)])
def test_what_is_no_archive_is_read_again(tmp_path: Path, follows: bytes) -> None:
    path = tmp_path / "a"
    with DurableFile(path, zipped=True) as file:
        file.write(b"before")
        file.write(os.urandom(LARGE_BYTES))
        if follows:
            file.write(follows)
    assert file.written == content_of(path)


def test_a_record_s_checksum_is_taken_for_its_own_size_only() -> None:
    def told(size: int) -> int:
        checksum = ZipChecksum(lambda _: 1)
        checksum.add(memoryview(bytes(LARGE_BYTES)))
        checksum.add(memoryview(b"PK\x07\x08" + (2).to_bytes(4, "little") + size.to_bytes(4, "little") * 2))
        return checksum._crc32

    assert len({told(LARGE_BYTES), told(LARGE_BYTES + 1)}) == 2


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (0, 5), (77, 1 << 20), (12345, 99991)])
def test_checksums_are_joined(first: int, second: int) -> None:
    a, b = os.urandom(first), os.urandom(second)
    assert joined(zlib.crc32(a), zlib.crc32(b), second) == zlib.crc32(a + b)


def failing(number: int) -> Callable[[int], None]:
    def call(_: int) -> None:
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize("call", ["fdatasync", "fsync"])
def test_what_the_disk_says_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setattr(durable.os, call, failing(errno.EIO))
    files = StateFiles()
    files.save(STATES["large"], tmp_path / "a.pt")
    files.save(STATES["small"], tmp_path / "b.pt")
    files.reach_disk([tmp_path])
    assert isinstance(files.error, OSError)
    assert files.error.errno == errno.EIO


def test_the_disk_is_behind_by_no_more_than_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "BEHIND_BYTES", 2 * CHUNK_BYTES)
    monkeypatch.setattr(durable.os, "fdatasync", lambda _: time.sleep(0.3))
    behind = []
    with DurableFile(tmp_path / "a") as file:
        for _ in range(5):
            file.write(bytes(CHUNK_BYTES))
            behind.append(file._bytes - file._begun)
    assert CHUNK_BYTES <= max(behind) < 2 * CHUNK_BYTES


def test_more_files_than_may_be_open(tmp_path: Path) -> None:
    files = StateFiles()
    for number in range(AT_ONCE + 3):
        files.write(tmp_path / str(number), b"x" * number)
    assert len(files._open) == 3
    files.reach_disk([tmp_path])
    assert files.error is None
    assert {path.name: each for path, each in files.written.items()} == {
        path.name: content_of(path) for path in tmp_path.iterdir()
    }
