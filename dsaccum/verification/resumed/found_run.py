"""What a run's directory says of it: its record, its steps so far, and the checkpoint that it would go on from.

Nothing in the directory is changed. A checkpoint is copied before it is used, since DeepSpeed writes beside one when it
converts it, and every file of the copy is compared with its checksum.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dsaccum.config.errors import ConfigError
from dsaccum.config.experiment import Experiment
from dsaccum.config.loading import experiment_of
from dsaccum.training.checkpoints.loading import damage_in
from dsaccum.training.checkpoints.manifest import MANIFEST, Manifest
from dsaccum.training.checkpoints.shelf import Checkpoint, Damaged, Shelf
from dsaccum.training.run_directory import RECORD, RunDirectory
from dsaccum.training.start import find_start

_READ: Final = "dsaccum.train/1"
Suits = Callable[["Steps"], bool]


@dataclass(frozen=True)
class Steps:
    """A run's windows up to a checkpoint, by its metrics.

    Attributes:
        effective_batches: of each window.
        updates: how many of them were applied.
    """

    effective_batches: tuple[int, ...]
    updates: int


@dataclass(frozen=True)
class FoundRun:
    """A run that can be gone on from.

    Attributes:
        directory: its own.
        record: ``run.json``.
        experiment: as it was resolved.
    """

    directory: RunDirectory
    record: Mapping[str, Any]
    experiment: Experiment

    @property
    def record_file(self) -> Path:
        """Where both configs stand."""
        return self.directory.path / RECORD

    @property
    def config(self) -> dict[str, Any]:
        """The DeepSpeed JSON as it was resolved."""
        return dict(self.record["deepspeed"])


def find_run(directory: Path) -> FoundRun:
    """Read ``run.json``.

    Raises:
        ConfigError: there is none, or another version of dsaccum wrote it.
    """
    start = find_start(str(directory), None)
    assert start.directory is not None
    schema = start.record.get("schema")
    place: dict[str, Any] = {"source": "--resume", "key": str(directory)}
    if schema != _READ:
        raise ConfigError(f"its run.json is {schema}, and this dsaccum reads {_READ}", **place, fix=_SAME_VERSION)
    if not all(isinstance(start.record.get(name), dict) for name in ("experiment", "deepspeed", "data")):
        raise ConfigError("its run.json lacks the configs or the data's hash", **place, fix=_SAME_VERSION)
    experiment = experiment_of(start.record["experiment"], start.directory.path / RECORD)
    return FoundRun(start.directory, start.record, experiment)


_SAME_VERSION = "the dsaccum that made the run"


def copy_checkpoint(run: FoundRun, folder: Path, suits: Suits) -> tuple[Checkpoint, Steps, list[str]]:
    """The newest whole checkpoint that suits, copied; the newest whole one where none does.

    Args:
        run: whose it is.
        folder: to copy it to.
        suits: whether going on from there can show anything.

    Returns:
        The copy, the run's steps before it, and a line for each newer one that was passed over.

    Raises:
        ConfigError: there is none, all are damaged, or the metrics don't reach so far.
    """
    passed_over: list[str] = []
    unsuited: list[Checkpoint] = []
    for checkpoint in Shelf(run.directory.checkpoints).newest_first():
        if isinstance(checkpoint, Damaged):
            passed_over.append(f"{checkpoint.path.name} is damaged ({checkpoint.reason})")
            continue
        if not suits(_steps(run, checkpoint.step)):
            unsuited.append(checkpoint)
            continue
        copy = _copied(checkpoint, folder, passed_over)
        if copy is not None:
            newer = [f"{each.path.name} is passed over: after it the learning rate stays 0" for each in unsuited]
            return copy, _steps(run, copy.step), [*newer, *passed_over]
    for checkpoint in unsuited:
        copy = _copied(checkpoint, folder, passed_over)
        if copy is not None:
            return copy, _steps(run, copy.step), passed_over
    raise _nothing(run, passed_over)


def _copied(checkpoint: Checkpoint, folder: Path, passed_over: list[str]) -> Checkpoint | None:
    target = folder / checkpoint.path.name
    try:
        shutil.copytree(checkpoint.path, target, ignore=shutil.ignore_patterns("universal*", "latest_universal"))
    except (OSError, shutil.Error) as error:
        passed_over.append(f"{checkpoint.path.name} could not be copied ({' '.join(str(error).split())[:200]})")
        shutil.rmtree(target, ignore_errors=True)
        return None
    copy = Checkpoint(target, checkpoint.manifest)
    damage = damage_in(copy, checkpoint.manifest.files)
    if damage is None:
        return copy
    passed_over.append(f"{checkpoint.path.name} is damaged ({damage})")
    shutil.rmtree(target)
    return None


def _nothing(run: FoundRun, passed_over: list[str]) -> ConfigError:
    place: dict[str, Any] = {"source": "--resume", "key": str(run.directory.path)}
    own = Manifest.model_fields["schema_name"].default
    strange = next((schema for schema in _schemas(run.directory.checkpoints) if schema != own), None)
    if strange is not None:  # before damage, for which other keys would be taken
        return ConfigError(
            f"its checkpoints are {strange}, which this dsaccum doesn't read", **place, fix=_SAME_VERSION
        )
    if passed_over:
        return ConfigError(f"holds no checkpoint that can be used: {'; '.join(passed_over)}", **place)
    return ConfigError("holds no whole checkpoint", **place, fix="a run with run.checkpoint_every below its steps")


def _schemas(checkpoints: Path) -> Iterator[str]:
    for path in checkpoints.glob(f"step-*/{MANIFEST}"):
        try:
            yield str(json.loads(path.read_bytes())["schema"])
        except (OSError, ValueError, KeyError, TypeError):
            continue


def _steps(run: FoundRun, step: int) -> Steps:
    """Of ``metrics.jsonl``, which the checkpoint's own counters have no part in."""
    place: dict[str, Any] = {"source": "--resume", "key": str(run.directory.path)}
    try:
        text = run.directory.metrics.read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
        before = [line for line in lines if line["step"] <= step]
        found = Steps(tuple(line["effective_batch"] for line in before), sum(bool(line["applied"]) for line in before))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"its metrics.jsonl cannot be read ({error})", **place) from error
    if [line["step"] for line in before] != list(range(1, step + 1)):
        raise ConfigError(f"its metrics.jsonl lacks steps of 1 to {step}, where the checkpoint stands", **place)
    return found
