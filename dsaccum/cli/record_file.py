"""``--json OUT.json``: a record in a new file, whose path is looked at before any work."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dsaccum.cli.outcome import NotCarriedOut
from dsaccum.config.errors import ConfigError

if TYPE_CHECKING:
    from dsaccum.records import Record


def check_record_path(path: Path) -> None:
    """A record that cannot be written in the end would be minutes lost.

    Raises:
        ConfigError: something is there already, or nothing can be written there.
    """
    if os.path.lexists(path):
        free = next(name for n in range(2, sys.maxsize) if not (name := path.with_stem(f"{path.stem}-{n}")).exists())
        problem = "is there already, and records don't overwrite one another"
        raise ConfigError(problem, key="--json", value=str(path), fix=f"--json {free}, or delete it")
    if not path.parent.is_dir():
        raise ConfigError("there is no such directory", key="--json", value=str(path), fix=f"mkdir -p {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError("its directory cannot be written to", key="--json", value=str(path), fix="name another file")


def write_record(record: Record, path: Path) -> None:
    """Write it.

    Raises:
        NotCarriedOut: it could not be written after all.
    """
    try:
        record.write(path)
    except OSError as error:
        raise NotCarriedOut(f"the record could not be written to {path}: {error.strerror or error}") from error
