"""What is kept for later starts, in the user's cache directory: losing it costs time and nothing else."""

from __future__ import annotations

import os
from pathlib import Path


def cached_file(kind: str, key: str) -> Path:
    """Where something of this kind stands; the directory need not exist."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "dsaccum" / kind / f"{key}.json"
