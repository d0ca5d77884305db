"""By how much this process grows while something runs, as the operating system sees it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path

_PROCESS = Path("/proc/self")
_RESET_PEAK = "5"


def resident_growth(run: Callable[[], object]) -> int | None:
    """Bytes between the resident memory before ``run`` and its peak during it; None where the system cannot tell.

    Memory that was freed but not given back would be used again unseen, so it is given back first.
    """
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    try:
        (_PROCESS / "clear_refs").write_text(_RESET_PEAK)
        before = _status("VmRSS")
    except (OSError, ValueError):
        run()
        return None
    run()
    return max(_status("VmHWM") - before, 0)


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", (_PROCESS / "status").read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(f"/proc/self/status has no {name}")
    return int(found[1]) * 1024
