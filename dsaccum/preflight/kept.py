"""Verdicts that were reached before, one file each, in the user's cache directory. Only ``equivalent`` is kept."""

from __future__ import annotations

import contextlib
from datetime import date
from typing import NamedTuple

from dsaccum.user_cache import cached_file
from dsaccum.verification.records.record import VerifyRecord


class Kept(NamedTuple):
    """An earlier verdict, and when it was reached."""

    record: VerifyRecord
    on: date


def find(fingerprint: str) -> Kept | None:
    """What was kept under this number; None where nothing was, or where it cannot be read."""
    path = cached_file("preflight", fingerprint)
    if not path.is_file():  # a pipe in its place would never answer
        return None
    with contextlib.suppress(OSError, ValueError):
        record = VerifyRecord.read(path)
        if record.verdict == "equivalent":
            return Kept(record, date.fromtimestamp(path.stat().st_mtime))
    return None


def keep(fingerprint: str, record: VerifyRecord) -> str | None:
    """Keep it for the next start; returns why not where that failed, which is no reason not to train."""
    path = cached_file("preflight", fingerprint)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()  # one that cannot be read, or else it had been found
        with contextlib.suppress(FileExistsError):  # another run was faster, and has found the same
            record.write(path)
    except (OSError, RuntimeError) as error:
        return f"it could not be kept in {path.parent} ({getattr(error, 'strerror', None) or error})"
    return None
