"""Continuing from a checkpoint: the newest whole one is chosen by all ranks together, and taken over by each."""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from dsaccum.durable import read_back
from dsaccum.engine.process import Ranks, seed_draws
from dsaccum.engine.state_files import UNIVERSAL_TAG, convert, load_state
from dsaccum.training.checkpoints.random_state import restore_random_state
from dsaccum.training.checkpoints.saving import random_file
from dsaccum.training.checkpoints.shelf import Checkpoint, Damaged, Shelf
from dsaccum.training.outcome import RunFailed

Note = Callable[[str], None]


def choose_checkpoint(shelf: Shelf, ranks: Ranks, note: Note, moved: Callable[[], None]) -> Checkpoint | None:
    """The newest whose files hold what was written; damaged ones are named and passed over. A collective.

    Args:
        shelf: of the run.
        ranks: this process's place.
        note: shows a line, on rank 0.
        moved: told that this rank moves.

    Returns:
        None where there is none at all.

    Raises:
        RunFailed: there are some, and all are damaged.
    """
    candidates: list[list[Checkpoint | Damaged]] = [list(shelf.newest_first()) if ranks.is_first else []]
    dist.broadcast_object_list(candidates)
    for checkpoint in candidates[0]:
        if isinstance(checkpoint, Damaged):
            damage: str | None = checkpoint.reason
        elif (damage := _damage(checkpoint, ranks, moved)) is None:
            return checkpoint
        note(f"warning: checkpoint {checkpoint.path} is damaged ({damage}); looking at the one before it")
    if candidates[0]:
        raise RunFailed(f"all checkpoints in {shelf.path} are damaged; fix: another --output-dir, to begin anew")
    return None


def _damage(checkpoint: Checkpoint, ranks: Ranks, moved: Callable[[], None]) -> str | None:
    """Each rank reads its share of the files."""
    own = damage_in(checkpoint, list(checkpoint.manifest.files)[ranks.rank :: ranks.world_size], moved)
    everyone: list[str | None] = [own] * ranks.world_size
    dist.all_gather_object(everyone, own)
    return next((damage for damage in everyone if damage), None)


def damage_in(checkpoint: Checkpoint, names: Iterable[str], moved: Callable[[], None] = lambda: None) -> str | None:
    """The first of these files that does not hold what was written, and what is wrong with it."""
    return next((what for name in names if (what := _differs(checkpoint, name, moved))), None)


def _differs(checkpoint: Checkpoint, name: str, moved: Callable[[], None]) -> str | None:
    due = checkpoint.manifest.files[name]
    try:
        found = read_back(checkpoint.path / name, moved)
    except OSError as error:
        return f"{name}: {error.strerror}"
    if found.bytes != due.bytes:
        return f"{name}: {found.bytes:,} bytes, {due.bytes:,} were written"
    return None if found == due else f"{name}: other bytes than were written"


def is_split_anew(checkpoint: Checkpoint, world_size: int) -> bool:
    """Whether DeepSpeed must convert it first: at ZeRO 1 to 3 each rank's file holds a share of the states."""
    manifest = checkpoint.manifest
    return manifest.zero_stage > 0 and manifest.split.world_size != world_size


def config_to_load(config: dict[str, Any], checkpoint: Checkpoint, world_size: int) -> dict[str, Any]:
    """The DeepSpeed JSON of an engine that takes the checkpoint over."""
    if not is_split_anew(checkpoint, world_size):
        return config
    return {**config, "checkpoint": {**config.get("checkpoint", {}), "load_universal": True}}


def prepare(checkpoint: Checkpoint, ranks: Ranks) -> None:
    """Convert it for this number of ranks, if it must be. A collective.

    Raises:
        RunFailed: DeepSpeed's converter could not.
    """
    if not is_split_anew(checkpoint, ranks.world_size):
        return
    answer: list[str | None] = [None]
    if ranks.is_first:
        forget_conversion(checkpoint)
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                convert(checkpoint.path)
        except Exception as error:
            answer = [f"{type(error).__name__}: {' '.join(str(error).split())}"]
    dist.broadcast_object_list(answer)
    if answer[0] is not None:
        was = checkpoint.manifest.split.world_size
        raise RunFailed(
            f"DeepSpeed could not convert {checkpoint.path} from {was} to {ranks.world_size} ranks "
            f"({answer[0]}); fix: continue on {was} ranks"
        )


def take_over(engine: Any, checkpoint: Checkpoint, ranks: Ranks, seed: int) -> None:
    """Parameters, optimizer, schedule, counters and generators, as they were saved. A collective.

    With another number of ranks the generators begin anew: no rank has drawn what a rank of these would have.

    Args:
        engine: DeepSpeed's, new, made with ``config_to_load``.
        checkpoint: prepared.
        ranks: this process's place.
        seed: of the run.
    """
    universal = is_split_anew(checkpoint, ranks.world_size)
    load_state(engine, checkpoint.path, universal=universal)
    if checkpoint.manifest.split.world_size == ranks.world_size:
        restore_random_state(torch.load(checkpoint.path / random_file(ranks.rank), weights_only=True))
    else:
        seed_draws(seed + checkpoint.step, ranks)
    if universal:
        dist.barrier()
        if ranks.is_first:
            forget_conversion(checkpoint)


def forget_conversion(checkpoint: Checkpoint) -> None:
    """It can be made again."""
    shutil.rmtree(checkpoint.path / UNIVERSAL_TAG, ignore_errors=True)
    (checkpoint.path / "latest_universal").unlink(missing_ok=True)
