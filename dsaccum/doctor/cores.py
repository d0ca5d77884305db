"""Cores of this process, and whether the ranks' threads fit them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Final

from dsaccum.doctor.control_groups import cpu_quota
from dsaccum.doctor.finding import Finding
from dsaccum.doctor.machine import Machine

MOST_RANKS: Final = 2
"""That ``dsaccum verify`` starts unasked."""


def check_cores(machine: Machine) -> Iterator[Finding]:
    """By affinity and by the time that is granted."""
    cores, quota = usable_cores(), cpu_quota(machine)
    of_all = "" if os.cpu_count() == cores else f" of {os.cpu_count()}, by affinity"
    granted = "" if quota is None else f"; time for {quota:g}, by control group"
    yield Finding("cores", f"{cores}{of_all}{granted}")
    yield _threads(machine, cores, cores if quota is None else min(cores, max(1, math.floor(quota))))


def usable_cores() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _threads(machine: Machine, cores: int, granted: int) -> Finding:
    """Threads of two ranks (of one, where there is one core) against the cores' time that they get."""
    ranks = min(MOST_RANKS, cores)
    written = machine.environment.get("OMP_NUM_THREADS")
    fix = f"export OMP_NUM_THREADS={max(1, granted // ranks)}"
    if written is None:
        each, found = max(1, cores // ranks), "OMP_NUM_THREADS is not set: cores are shared out among the ranks"
    else:
        first = written.partition(",")[0].strip()
        found = f"OMP_NUM_THREADS={written}"
        if not first.isdigit() or int(first) < 1:
            return Finding("threads", found, "note", "is no number of threads, so each rank takes all cores", fix)
        each = int(first)
    if ranks * each <= max(granted, ranks):
        return Finding("threads", found)
    consequence = f"{ranks} ranks of {each} threads wait for one another on {granted} cores: slow, though right"
    return Finding("threads", found, "note", consequence, fix)
