"""Main memory, and the shared memory that GPUs' ranks talk through."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator

from dsaccum.doctor.control_groups import memory_left
from dsaccum.doctor.finding import Finding
from dsaccum.doctor.machine import Machine
from dsaccum.report.figures import size

# Resident memory of `dsaccum verify --deepspeed ds_configs/accum4.json`, its ranks included: 1.7 GiB with two.
_TWO_RANKS, _LEAST = 2 << 30, 1 << 30
_LEAST_SHARED = 128 << 20
"""A container gets 64 MiB unless told otherwise; NCCL takes about 10 MiB for each pair of GPUs."""


def check_memory(machine: Machine) -> Iterator[Finding]:
    """What is available, also to the control group."""
    import psutil

    system, left = psutil.virtual_memory().available, memory_left(machine)
    available = system if left is None else min(system, left)
    found = f"{size(available)} available"
    if left is not None and left < system:
        found += ", by control group"
    if available >= _TWO_RANKS:
        yield Finding("memory", found)
    elif available >= _LEAST:
        fix = "dsaccum verify --deepspeed ds_configs/accum4.json --ranks 1"
        yield Finding("memory", found, "note", "verifying with two ranks takes 1.7 GiB, with one rank 1.3 GiB", fix)
    else:
        consequence = "verifying takes 1.3 GiB at least: the system would kill a rank"
        yield Finding(
            "memory", found, "problem", consequence, "ps -eo pid,rss,args --sort=-rss | head  # end what is not needed"
        )


def check_shared_memory(machine: Machine) -> Iterator[Finding]:
    """The size of /dev/shm, the classic surprise in a container."""
    if not sys.platform.startswith("linux"):
        return
    try:
        usage = shutil.disk_usage(machine.root / "dev/shm")
    except OSError:
        yield _too_small(machine, "there is no /dev/shm")
        return
    found = f"{size(usage.free)} free of {size(usage.total)} in /dev/shm"
    yield Finding("shared memory", found) if usage.free >= _LEAST_SHARED else _too_small(machine, found)


def _too_small(machine: Machine, found: str) -> Finding:
    if machine.in_container:
        fix = "docker run --shm-size=1g ...  # in place of this container"
    else:
        fix = "sudo mount -o remount,size=1G /dev/shm"
    if machine.gpu_devices > 1:
        return Finding("shared memory", found, "problem", "NCCL fails between GPUs: its buffers lie there", fix)
    return Finding("shared memory", found, "note", "ranks on CPUs and a single GPU do without; several GPUs don't", fix)
