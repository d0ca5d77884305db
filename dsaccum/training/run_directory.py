"""A run's directory: a fresh one, or that of the run which is continued; never somebody else's."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dsaccum.config.errors import ConfigError

RECORD, LOCK = "run.json", "run.lock"
DEFAULT_PARENT = Path("runs")


@dataclass(frozen=True)
class RunDirectory:
    """Paths inside a run's directory, and its record ``run.json``."""

    path: Path

    @property
    def metrics(self) -> Path:
        """One line per optimizer step."""
        return self.path / "metrics.jsonl"

    @property
    def model(self) -> Path:
        """The trained model, in transformers' own format."""
        return self.path / "model"

    @property
    def checkpoints(self) -> Path:
        """The newest whole states of the run."""
        return self.path / "checkpoints"

    def read_record(self) -> dict[str, Any] | None:
        """``run.json``; None where there is none that can be read."""
        try:
            record = json.loads((self.path / RECORD).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        ours = isinstance(record, dict) and str(record.get("schema", "")).startswith("dsaccum.train/")
        return record if ours else None

    def lock(self) -> BinaryIO:
        """Keep other runs out until what is returned is closed, or this process ends, however it ends.

        Raises:
            ConfigError: another one is at work in it, or nothing may be written there.
        """
        try:
            file = (self.path / LOCK).open("ab")
        except OSError as error:
            problem = f"cannot be written to ({error.strerror}: {error.filename})"
            raise ConfigError(problem, source=str(self.path), fix="a run directory that you may write to") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            fix = "wait until it has ended, or another --output-dir"
            raise ConfigError("another run is at work in it", source=str(self.path), fix=fix) from error
        return file

    def is_free(self) -> bool:
        """Whether no run is at work in it."""
        try:
            self.lock().close()
        except (ConfigError, OSError):
            return False
        return True

    def write_record(self, record: dict[str, Any]) -> None:
        """Replace ``run.json`` in one step, so that it is never half written; in place where no second one fits."""
        target = self.path / RECORD
        draft = target.with_suffix(f".{os.getpid()}.tmp")
        text = json.dumps(record, indent=2, allow_nan=False, default=str) + "\n"
        try:
            draft.write_text(text, encoding="utf-8")
            draft.replace(target)
        except OSError:
            draft.unlink(missing_ok=True)
            target.write_text(text, encoding="utf-8")

    def status(self) -> str | None:
        """What ``run.json`` says of the run; None where it says nothing."""
        try:
            return str(json.loads((self.path / RECORD).read_text(encoding="utf-8"))["status"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def check_new_directory(wanted: str | None) -> None:
    """Refuse a directory that can't take a new run. Changes nothing.

    Raises:
        ConfigError: it holds a run or foreign files, is no directory, or can't be written.
    """
    path = Path(wanted) if wanted is not None else DEFAULT_PARENT
    place: dict[str, Any] = {"source": "--output-dir" if wanted is not None else "default run directory"}
    place |= {"key": str(path)}
    try:
        str(path).encode("utf-8")
        if wanted is not None and path.is_dir() and any(path.iterdir()):
            raise ConfigError(_what_it_holds(path), **place, fix=_way_out(path))
        existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot be used ({error})", **place, allowed="a new or empty directory") from error
    if not existing.is_dir():
        raise ConfigError(f"{existing} is a file", **place, allowed="a new or empty directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{existing} is not writable", **place, fix="an --output-dir that you may write to")


def create_output_directory(wanted: str | None, name: str) -> RunDirectory:
    """Make the directory that ``check_new_directory`` allowed; the default is ``runs/<name>-<n>`` with a fresh n.

    Raises:
        ConfigError: the file system refuses.
    """
    try:
        if wanted is not None:
            Path(wanted).mkdir(parents=True, exist_ok=True)
            return RunDirectory(Path(wanted))
        return RunDirectory(_fresh_directory(name))
    except OSError as error:
        problem = f"the run directory cannot be made ({error.strerror}: {error.filename})"
        raise ConfigError(problem, source="--output-dir", fix="an --output-dir that you may write to") from error


def _fresh_directory(name: str) -> Path:
    DEFAULT_PARENT.mkdir(parents=True, exist_ok=True)
    taken = [
        int(path.name[len(name) + 1 :])
        for path in DEFAULT_PARENT.glob(f"{name}-*")
        if path.name[len(name) + 1 :].isdecimal()
    ]
    number = max(taken, default=0) + 1
    while True:
        path = DEFAULT_PARENT / f"{name}-{number}"
        try:
            path.mkdir()
        except FileExistsError:  # another run was quicker
            number += 1
        else:
            return path


def _what_it_holds(path: Path) -> str:
    try:
        record = json.loads((path / RECORD).read_text(encoding="utf-8"))
        return f"it holds a run already ({record['name']}, {record['status']})"
    except FileNotFoundError:
        return "it holds files that are not a run of dsaccum"
    except (OSError, ValueError, KeyError, TypeError):
        return f"it holds a {RECORD} that can't be read"


def _way_out(path: Path) -> str:
    """Only a run of ours may be told to go."""
    ours = (path / RECORD).exists() or (path / "metrics.jsonl").exists()
    return f"another --output-dir, or remove {path}" if ours else "another --output-dir"
