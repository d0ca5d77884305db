"""Saving a run's state: written aside, made durable, then made current in one step, or not at all on any rank."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from dsaccum.durable import Written
from dsaccum.engine.state_files import StateFiles, save_state
from dsaccum.training.checkpoints.manifest import MANIFEST, Counters, Manifest, Split, StreamOrigin
from dsaccum.training.checkpoints.random_state import random_state
from dsaccum.training.checkpoints.shelf import Shelf

_T = TypeVar("_T")


def random_file(rank: int) -> str:
    """Where a rank keeps its generators."""
    return f"random-{rank}.pt"


@dataclass(frozen=True)
class Saved:
    """How it went, the same on all ranks.

    Attributes:
        path: of the checkpoint; None where it could not be written.
        error: why.
        seconds: it took.
        bytes: of all files.
    """

    path: Path | None
    error: str | None
    seconds: float
    bytes: int


class CheckpointWriter:
    """One run's checkpoints.

    Args:
        engine: DeepSpeed's.
        shelf: where they stand.
        split: how this run splits its effective batch just now.
        origin: where its windows begin in the stream.
        keep: so many of the newest are kept.
        versions: of the libraries.
        rank: this process's.
        metrics_durable: makes ``metrics.jsonl`` durable, returns its length; asked on rank 0.
        moved: told that this rank moves.
        gather: comes back when all ranks have called it, however long one of them writes.
    """

    def __init__(
        self,
        engine: Any,
        shelf: Shelf,
        split: Callable[[], Split],
        origin: StreamOrigin,
        keep: int,
        versions: dict[str, str],
        rank: int,
        metrics_durable: Callable[[], int],
        moved: Callable[[], None],
        gather: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine, self._shelf, self._split, self._origin, self._keep = engine, shelf, split, origin, keep
        self._versions, self._rank, self._metrics_durable, self._moved = versions, rank, metrics_durable, moved
        self._gather = gather

    def save(self, counters: Counters) -> Saved:
        """Save at a window's boundary. A collective; where a file cannot be written, all ranks learn why."""
        started = time.perf_counter()
        draft = self._begin(counters.step)
        if isinstance(draft, str):
            return Saved(None, draft, time.perf_counter() - started, 0)
        files = StateFiles(self._moved)
        save_state(self._engine, draft, files)
        files.save(random_state(), draft / random_file(self._rank))
        self._gather()
        problem, size = self._complete(draft, counters, files)
        problem = self._publish(draft, problem)
        path = None if problem else draft.with_name(f"step-{counters.step}")
        return Saved(path, problem, time.perf_counter() - started, size)

    def _begin(self, step: int) -> Path | str:
        """Rank 0 makes the draft; all get it, or what is wrong."""
        answer: list[Path | str] = [""]
        if self._rank == 0:
            try:
                answer = [self._shelf.draft(step)]
            except OSError as error:
                answer = [_said(error) or ""]
        dist.broadcast_object_list(answer)
        return answer[0]

    def _complete(self, draft: Path, counters: Counters, files: StateFiles) -> tuple[str | None, int]:
        """The manifest is added, and everything reaches the disk, or all ranks learn why not."""
        own = {str(path.relative_to(draft)): each for path, each in files.written.items()}
        everyone = _gathered((own, files.error is None))
        written = dict(sorted(item for of_rank, _ in everyone for item in of_rank.items()))
        directories: list[Path] = []
        if self._rank == 0 and all(well for _, well in everyone):
            self._add_manifest(draft, counters, written, files)
            directories = [Path(name) for name, _, _ in os.walk(draft)]
        files.reach_disk(directories)
        self._gather()
        errors = _gathered(_said(files.error))
        problem = next((f"rank {rank}: {error}" for rank, error in enumerate(errors) if error), None)
        return problem, sum(each.bytes for each in written.values())

    def _add_manifest(self, draft: Path, counters: Counters, written: dict[str, Written], files: StateFiles) -> None:
        try:
            manifest = Manifest(
                counters=counters,
                split=self._split(),
                origin=self._origin,
                zero_stage=self._engine.zero_optimization_stage(),
                metrics_bytes=self._metrics_durable(),
                versions=self._versions,
                files=written,
            )
        except OSError as error:
            files.error = error
        else:
            files.write(draft / MANIFEST, manifest.as_bytes())

    def _publish(self, draft: Path, problem: str | None) -> str | None:
        """Rank 0 makes the draft current, or removes it; all learn what is wrong."""
        answer = [problem]
        if self._rank == 0:
            try:
                if problem is None:
                    self._shelf.publish(draft, self._keep)
            except OSError as error:
                answer = [_said(error)]
            if answer[0] is not None:
                shutil.rmtree(draft, ignore_errors=True)
        dist.broadcast_object_list(answer)
        return answer[0]


def _gathered(own: _T) -> list[_T]:
    """Of all ranks. A collective."""
    everyone = [own] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


def _said(error: Exception | None) -> str | None:
    if error is None:
        return None
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
