"""Names that may be a local directory or a hub id."""

from __future__ import annotations

from pathlib import Path


def is_missing_directory(name: str) -> bool:
    """Whether a name that can only be a path, never a hub id, is no directory: asking the hub would just cost time."""
    try:
        return name.startswith((".", "/", "~")) and not Path(name).is_dir()
    except OSError:  # too long for the file system
        return True
