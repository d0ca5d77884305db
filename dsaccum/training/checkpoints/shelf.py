"""The directory ``checkpoints/`` of a run: whole ones, drafts, and which of them are kept."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dsaccum.durable import make_durable
from dsaccum.training.checkpoints.manifest import MANIFEST, Manifest

_NAME = re.compile(r"step-(\d+)")
_DRAFT = ".partial"


@dataclass(frozen=True)
class Checkpoint:
    """A whole one: it was renamed to its name after everything in it had reached the disk."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Windows that were done."""
        return self.manifest.counters.step


@dataclass(frozen=True)
class Damaged:
    """What has a checkpoint's name, and a manifest that is not what was written."""

    path: Path
    reason: str


class Shelf:
    """All checkpoints of one run.

    Args:
        path: ``checkpoints/`` of the run's directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def newest_first(self) -> Iterator[Checkpoint | Damaged]:
        """All that have the name of one."""
        steps = {int(match[1]): entry for entry, match in self._entries() if match}
        for step in sorted(steps, reverse=True):
            yield _read(steps[step], step)

    def draft(self, step: int) -> Path:
        """An empty directory to write into; it is no checkpoint until ``publish``.

        Raises:
            OSError: the file system refuses.
        """
        self.clear_drafts()
        draft = self.path / f"step-{step}{_DRAFT}"
        if not self.path.is_dir():
            self.path.mkdir()  # but not the run's directory: where that is gone, somebody should know
            make_durable(self.path.parent)
        draft.mkdir()
        return draft

    def publish(self, draft: Path, keep: int) -> None:
        """Make a draft current in one step, and remove what is older than the ``keep`` newest whole ones.

        What is newer goes, too: it is damaged, as the run was continued from one before it.

        Args:
            draft: all of it has reached the disk, with its manifest.
            keep: how many.

        Raises:
            OSError: the file system refuses; the draft is no checkpoint then.
        """
        path = draft.with_name(draft.name.removesuffix(_DRAFT))
        if path.exists():  # of a run that was continued from an earlier one, since this one was damaged
            self._remove(path)
        draft.rename(path)
        make_durable(self.path)
        every = list(self.newest_first())
        at = [each.path for each in every].index(path)
        whole = [each for each in every[at:] if isinstance(each, Checkpoint)]
        for gone in [*every[:at], *whole[keep:]]:
            self._remove(gone.path)

    def clear_drafts(self) -> None:
        """Remove what a run that was ended while it wrote has left, or while it removed."""
        for entry, match in self._entries():
            if match is None and entry.name.endswith(_DRAFT):
                shutil.rmtree(entry, ignore_errors=True)

    def _remove(self, path: Path) -> None:
        """A checkpoint that is removed half is none from the beginning on: it loses its name first."""
        dying = path.with_name(path.name + ".old" + _DRAFT)
        path.rename(dying)
        shutil.rmtree(dying, ignore_errors=True)

    def _entries(self) -> list[tuple[Path, re.Match[str] | None]]:
        if not self.path.is_dir():
            return []
        return [(entry, _NAME.fullmatch(entry.name)) for entry in self.path.iterdir()]


def _read(path: Path, step: int) -> Checkpoint | Damaged:
    try:
        manifest = Manifest.read(path)
    except OSError as error:
        return Damaged(path, f"{MANIFEST}: {error.strerror}")
    except ValueError:
        return Damaged(path, f"{MANIFEST}: other values than were written")
    if manifest.counters.step != step:
        return Damaged(path, f"{MANIFEST}: of step {manifest.counters.step}")
    return Checkpoint(path, manifest)
