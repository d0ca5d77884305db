"""Saving a run's state: written aside, made durable, then made current in one step, or not at all on any rank."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dsaccum.durable import Written
from dsaccum.engine.state_files import StateFiles, save_state
from dsaccum.training.checkpoints.manifest import Counters, Manifest, Split, StreamOrigin
from dsaccum.training.checkpoints.random_state import random_state
from dsaccum.training.checkpoints.shelf import Shelf


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
        split: how this run splits its effective batch.
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
        split: Split,
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
        problem, size = self._publish(draft, counters, files)
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

    def _publish(self, draft: Path, counters: Counters, files: StateFiles) -> tuple[str | None, int]:
        own = ({str(path.relative_to(draft)): written for path, written in files.written.items()}, _said(files.error))
        everyone: list[tuple[dict[str, Written], str | None]] = [own] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        problem = next((f"rank {rank}: {error}" for rank, (_, error) in enumerate(everyone) if error), None)
        size = sum(written.bytes for of_rank, _ in everyone for written in of_rank.values())
        if self._rank == 0:
            problem = problem or self._make_current(draft, counters, dict(_merged(everyone)))
            if problem:
                shutil.rmtree(draft, ignore_errors=True)
        answer = [problem]
        dist.broadcast_object_list(answer)
        return answer[0], size

    def _make_current(self, draft: Path, counters: Counters, files: dict[str, Written]) -> str | None:
        try:
            manifest = Manifest(
                counters=counters,
                split=self._split,
                origin=self._origin,
                zero_stage=self._engine.zero_optimization_stage(),
                metrics_bytes=self._metrics_durable(),
                versions=self._versions,
                files=files,
            )
            self._shelf.publish(draft, manifest, self._keep)
        except OSError as error:
            return _said(error)
        return None


def _merged(everyone: list[tuple[dict[str, Written], str | None]]) -> list[tuple[str, Written]]:
    return sorted((name, written) for files, _ in everyone for name, written in files.items())


def _said(error: Exception | None) -> str | None:
    if error is None:
        return None
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
