"""What a container or a service manager grants this process: limits of Linux control groups, version 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from dsaccum.doctor.machine import Machine

_MOUNT = PurePosixPath("sys/fs/cgroup")
_UNLIMITED = 1 << 60
"""Version 1 says "none" with a huge number."""


def cpu_quota(machine: Machine) -> float | None:
    """Cores' worth of time; None where there is no limit."""
    quotas = [*_quotas_of_version_2(machine), *_quotas_of_version_1(machine)]
    return min(quotas, default=None)


def memory_left(machine: Machine) -> int | None:
    """Bytes until the limit, caches that can be dropped not counted; None where there is no limit."""
    left = []
    for controller, limit_name, used_name, dropped_key in (
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for folder in _folders(machine, controller):
            limit, used = (_number(machine.read(f"{folder}/{name}")) for name in (limit_name, used_name))
            if limit is not None and used is not None and limit < _UNLIMITED:
                left.append(limit - used + _entry(machine.read(f"{folder}/memory.stat"), dropped_key))
    return min(left, default=None)


def _quotas_of_version_2(machine: Machine) -> Iterator[float]:
    for folder in _folders(machine, ""):
        quota, _, period = (machine.read(f"{folder}/cpu.max") or "").strip().partition(" ")
        if quota.isdigit() and period.isdigit():
            yield int(quota) / int(period)


def _quotas_of_version_1(machine: Machine) -> Iterator[float]:
    for folder in _folders(machine, "cpu"):
        quota, period = (_number(machine.read(f"{folder}/cpu.cfs_{each}_us")) for each in ("quota", "period"))
        if quota is not None and period:
            yield quota / period


def _folders(machine: Machine, controller: str) -> Iterator[PurePosixPath]:
    """This process's group and all above it: each of them limits. The controller is empty in version 2."""
    for line in (machine.read("proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            mount = _MOUNT / controllers
            # Inside a container the path may be the host's, and its folder is not there: the files then say nothing.
            group = mount.joinpath(*(part for part in path.split("/") if part not in ("", "..")))
            yield from (each for each in (group, *group.parents) if each.is_relative_to(mount))


def _number(text: str | None) -> int | None:
    """None for what is no limit: ``max``, ``-1``, or no file."""
    return int(text) if text is not None and text.strip().isdigit() else None


def _entry(text: str | None, key: str) -> int:
    entries = dict(line.split(" ", 1) for line in (text or "").splitlines() if " " in line)
    return _number(entries.get(key)) or 0
