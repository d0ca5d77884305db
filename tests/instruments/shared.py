"""One start of ranks for all tests of a file, also when pytest-xdist spreads them over several workers."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from tests.ranks import run_on_ranks


def measured_once(factory: Any, name: str, function: Callable[..., Any], world_size: int) -> list[Any]:
    """What ``function`` returned on each rank; the first worker runs it, the others read its result."""
    folder: Path = factory.getbasetemp()
    if folder.name.startswith("popen-"):  # a worker of pytest-xdist has a folder of its own below the common one
        folder = folder.parent
    stored = folder / f"{name}.pickle"
    with FileLock(str(stored) + ".lock", timeout=250):
        if not stored.exists():
            ranks = folder / name
            ranks.mkdir()
            stored.write_bytes(pickle.dumps(run_on_ranks(function, world_size, ranks)))
    return pickle.loads(stored.read_bytes())
