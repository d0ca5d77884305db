"""The folder in which torch compiles extensions: locks that nobody holds, and builds of other environments."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from dsaccum.doctor.finding import Finding
from dsaccum.doctor.machine import Machine
from dsaccum.doctor.torch_build import TorchBuild, package_folder
from dsaccum.report.figures import counted

STALE_S = 300.0
"""A lock that nobody here holds may be that of another container or machine, which compiles for minutes at most."""

_SOURCES = re.compile(r"(?:-I|-isystem) ?'?([^\s']+?)/(?:torch/include|deepspeed/ops/csrc)\b")
"""The folder of packages that a build's headers came from."""


def extension_cache(machine: Machine) -> Path | None:
    """Where torch compiles, by its own rule; None where that depends on a torch that is not there."""
    given = machine.environment.get("TORCH_EXTENSIONS_DIR")
    if given is not None:
        return Path(given).absolute()
    build = TorchBuild.installed()
    if build is None:
        return None
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    return _user_caches(machine) / "torch_extensions" / f"{python}_{build.tag}"


def check_extension_cache(machine: Machine) -> Iterator[Finding]:
    """Its locks and its builds."""
    cache = extension_cache(machine)
    if cache is None:
        return
    # As torch makes them: a folder for each extension, a file `lock` in it while one process compiles.
    locks, builds = sorted(cache.glob("*/lock")), sorted(cache.glob("*/build.ninja"))
    yield Finding(
        "extensions", f"{counted(len(builds), 'compiled extension') if builds else 'nothing compiled'} in {cache}"
    )
    yield from _lock_findings(locks)
    yield from _foreign_builds(cache, builds)


def _lock_findings(locks: Iterable[Path]) -> Iterator[Finding]:
    ages = {lock: age for lock in locks if (age := _age_s(lock)) is not None}
    holders = _holders(ages) if ages else {}
    for lock, age in ages.items():
        found, remove = f"{lock.parent.name}/lock, {age / 60:.0f} min old", f"rm {shlex.quote(str(lock))}"
        if lock in holders:
            yield Finding("lock", f"{found}: process {holders[lock]} compiles", "note", "other starts wait for it")
        elif age >= STALE_S:
            consequence = f"whoever needs {lock.parent.name} waits for ever: its builder was killed"
            yield Finding("stale lock", found, "problem", consequence, remove)
        else:
            consequence = "no process here holds it: unless another container or machine compiles, all starts will wait"
            yield Finding("lock", found, "note", consequence, remove)


def _holders(locks: Mapping[Path, float]) -> dict[Path, int]:
    """Who has each lock open: torch keeps it open while it compiles."""
    import psutil

    wanted = {str(lock.resolve()): lock for lock in locks}
    holders = {}
    for process in psutil.process_iter():
        try:
            opened = [file.path for file in process.open_files()]
        except (psutil.Error, OSError):  # another user's, or gone
            continue
        holders.update({wanted[path]: process.pid for path in opened if path in wanted})
    return holders


def _foreign_builds(cache: Path, builds: Iterable[Path]) -> Iterator[Finding]:
    """Builds whose headers belong to another torch or DeepSpeed than the installed ones."""
    ours = {str(folder.parent.resolve()) for name in ("torch", "deepspeed") if (folder := package_folder(name))}
    if not ours:
        return
    foreign: dict[str, list[str]] = {}
    for build in builds:
        for place in _headers(build) - ours:
            foreign.setdefault(place, []).append(build.parent.name)
    for place, names in sorted(foreign.items()):
        if not _is_gone(place):
            consequence = "environments that share a cache overwrite each other's builds, and crash"
            fix = f'export TORCH_EXTENSIONS_DIR="$HOME/.cache/torch_extensions-{Path(sys.prefix).name}"'
            yield Finding("mixed cache", f"{', '.join(names)} built for {place}", "problem", consequence, fix)
        else:
            fix = " ".join(["rm -r", *(shlex.quote(str(cache / name)) for name in names)])
            consequence = "they are compiled anew when they are needed"
            yield Finding(
                "old builds", f"{', '.join(names)} built for {place}, which is gone", "note", consequence, fix
            )


def _headers(build: Path) -> set[str]:
    try:
        text = build.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    return {str(Path(place).resolve()) for place in _SOURCES.findall(text)}


def _is_gone(place: str) -> bool:
    try:
        os.stat(place)
    except FileNotFoundError:
        return True
    except OSError:  # in another user's home, perhaps
        return False
    return False


def _age_s(path: Path) -> float | None:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:  # released in between
        return None


def _user_caches(machine: Machine) -> Path:
    if sys.platform == "darwin":
        return machine.home / "Library/Caches"
    return Path(machine.environment.get("XDG_CACHE_HOME") or machine.home / ".cache")
