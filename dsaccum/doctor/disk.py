"""Folders that are written to: whether they can be, and the room that is left."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from dsaccum.doctor.extension_cache import extension_cache
from dsaccum.doctor.finding import Finding
from dsaccum.doctor.machine import Machine
from dsaccum.report.figures import size

_LEAST, _COMFORTABLE = 100 << 20, 2 << 30


def check_temporary_folder(machine: Machine) -> Iterator[Finding]:
    """The one that Python would take: the first that can be written to."""
    named = {name: machine.environment[name] for name in ("TMPDIR", "TEMP", "TMP") if machine.environment.get(name)}
    unusable = {name: folder for name, folder in named.items() if not _is_usable(Path(folder))}
    folder = _temporary_folder(machine)
    if folder is None:
        fix = 'mkdir -p "$HOME/tmp" && export TMPDIR="$HOME/tmp"'
        yield Finding("temporary files", "no folder for them", "problem", "Python and compilers need one", fix)
        return
    yield Finding("temporary files", str(folder))
    for name, path in unusable.items():
        found, consequence = f"{name}={path}, which cannot be written to", "it is passed over by some, and fails others"
        yield Finding("temporary files", found, "note", consequence, f"unset {name}")


def check_disk(machine: Machine) -> Iterator[Finding]:
    """Room and permission, once for each file system."""
    uses: dict[int, tuple[Path, list[str]]] = {}
    for use, folder in _folders(machine).items():
        there = _nearest(folder)
        if not _is_usable(there):
            fix = f"ls -ld {shlex.quote(str(there))}"
            yield Finding("disk", f"{folder} cannot be written to", "note", f"it is where {use} would go", fix)
        else:
            uses.setdefault(there.stat().st_dev, (there, []))[1].append(use)
    for folder, names in uses.values():
        yield _room(folder, names)


def _room(folder: Path, uses: list[str]) -> Finding:
    free = shutil.disk_usage(folder).free
    found = f"{size(free)} free for {', '.join(uses)}"
    fix = f"du -xh --max-depth=1 {shlex.quote(str(folder))} | sort -h | tail  # delete what is not needed"
    if free >= _COMFORTABLE:
        return Finding("disk", found)
    if free >= _LEAST:
        return Finding("disk", found, "note", "a model, its checkpoints or a data set may not fit", fix)
    return Finding("disk", found, "problem", "hardly anything can be written", fix)


def _folders(machine: Machine) -> dict[str, Path]:
    hub = machine.environment.get("HF_HOME")
    caches = Path(machine.environment.get("XDG_CACHE_HOME") or machine.home / ".cache")
    folders = {
        "runs": Path.cwd(),
        "temporary files": _temporary_folder(machine),
        "extensions": extension_cache(machine),
        "the Hugging Face cache": Path(hub) if hub else caches / "huggingface",
    }
    return {use: folder for use, folder in folders.items() if folder is not None}


def _temporary_folder(machine: Machine) -> Path | None:
    """By Python's rule; ``tempfile.gettempdir`` would write a file to find out."""
    named = [machine.environment.get(name) for name in ("TMPDIR", "TEMP", "TMP")]
    ahead = [Path(folder) for folder in named if folder] + [machine.root / folder for folder in ("tmp", "var/tmp")]
    return next((folder for folder in [*ahead, Path.cwd()] if _is_usable(folder)), None)


def _nearest(folder: Path) -> Path:
    """The folder, or what is there of the way to it."""
    return next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())


def _is_usable(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
