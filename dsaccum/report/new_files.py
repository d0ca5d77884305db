"""Files that a command is asked to write (``--json``, ``--html``): looked at before any work, never overwritten."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from dsaccum.config.errors import ConfigError


def check_new_files(paths: Mapping[str, Path | None]) -> None:
    """What cannot be written in the end would be minutes lost.

    Args:
        paths: by the flag that asked for each; None where it was not given.

    Raises:
        ConfigError: something is there already, nothing can be written there, or two flags name the same file.
    """
    flag_of: dict[Path, str] = {}
    for flag, path in paths.items():
        if path is None:
            continue
        _check(flag, path)
        other = flag_of.setdefault(path.absolute(), flag)
        if other != flag:
            raise ConfigError(f"is what {other} is to write", key=flag, value=str(path), fix="name another file")


def _check(flag: str, path: Path) -> None:
    if os.path.lexists(path):
        free = next(name for n in range(2, sys.maxsize) if not (name := path.with_stem(f"{path.stem}-{n}")).exists())
        problem = "is there already, and records don't overwrite one another"
        raise ConfigError(problem, key=flag, value=str(path), fix=f"{flag} {free}, or delete it")
    if not path.parent.is_dir():
        raise ConfigError("there is no such directory", key=flag, value=str(path), fix=f"mkdir -p {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError("its directory cannot be written to", key=flag, value=str(path), fix="name another file")
