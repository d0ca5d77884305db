"""The directory ``checkpoints/`` of a run: whole ones, drafts, and which of them are kept."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dsaccum.durable import make_durable
from dsaccum.training.checkpoints.manifest import Manifest

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


class Shelf:
    """All checkpoints of one run.

    Args:
        path: ``checkpoints/`` of the run's directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def newest_first(self) -> Iterator[Checkpoint]:
        """The whole ones."""
        steps = {int(match[1]): entry for entry, match in self._entries() if match}
        for step in sorted(steps, reverse=True):
            manifest = Manifest.read(steps[step])
            if manifest is not None and manifest.counters.step == step:
                yield Checkpoint(steps[step], manifest)

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
        """Make a draft current in one step, and remove what is older than the ``keep`` newest.

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
        for old in list(self.newest_first())[keep:]:
            self._remove(old.path)

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
