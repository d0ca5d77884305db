"""Ranks agree on what is continued: which run, from which checkpoint, and where in the stream of samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch.distributed as dist

from dsaccum.config.errors import ConfigError
from dsaccum.engine.process import Ranks
from dsaccum.training.checkpoints.loading import choose_checkpoint
from dsaccum.training.checkpoints.manifest import Counters, Split, StreamOrigin
from dsaccum.training.checkpoints.shelf import Checkpoint, Shelf
from dsaccum.training.inputs import Inputs
from dsaccum.training.run_directory import RunDirectory
from dsaccum.training.start import Start, check_same_experiment


@dataclass(frozen=True)
class Continuation:
    """A run that goes on, the same on all ranks.

    Attributes:
        directory: of the run.
        checkpoint: None where the run ended before its first: it begins again, in the same directory.
        origin: of the coming windows in the stream.
        continued: what ``run.json`` says of all times that the run was continued.
        lock: rank 0's, which keeps other runs out.
    """

    directory: RunDirectory
    checkpoint: Checkpoint | None
    origin: StreamOrigin
    continued: list[dict[str, Any]]
    lock: BinaryIO | None

    @property
    def counters(self) -> Counters:
        """Where it stands."""
        return self.checkpoint.manifest.counters if self.checkpoint is not None else Counters()

    @property
    def metrics_bytes(self) -> int:
        """Of ``metrics.jsonl`` that are kept."""
        return self.checkpoint.manifest.metrics_bytes if self.checkpoint is not None else 0


def agree_on_continuation(
    inputs: Inputs, ranks: Ranks, record: dict[str, Any], note: Callable[[str], None], moved: Callable[[], None]
) -> Continuation | None:
    """What is continued; None for a run that begins. A collective.

    Args:
        inputs: with what rank 0 found.
        ranks: this process's place.
        record: what this run's ``run.json`` would say.
        note: shows a line, on rank 0.
        moved: told that this rank moves.

    Raises:
        ConfigError: that run can't be continued as this one, on all ranks alike.
        RunFailed: all its checkpoints are damaged.
    """
    start, lock = _agree_on_start(inputs, ranks, record)
    if start.directory is None:
        return None
    checkpoint = choose_checkpoint(Shelf(start.directory.checkpoints), ranks, note, moved)
    origin = _origin(inputs, checkpoint)
    continued = list(start.record.get("continued", []))
    if checkpoint is not None:
        _check_steps(inputs, start, checkpoint)
        note(_told(inputs, checkpoint))
        continued.append(_entry(checkpoint, record))
    else:
        note(f"continued       {start.directory.path} has no checkpoint yet: from the beginning")
    return Continuation(start.directory, checkpoint, origin, continued, lock)


def _agree_on_start(inputs: Inputs, ranks: Ranks, record: dict[str, Any]) -> tuple[Start, BinaryIO | None]:
    """Rank 0 has looked; it keeps other runs out, and compares."""
    answer: list[Start | ConfigError] = [inputs.start]
    lock = None
    if ranks.is_first and inputs.start.directory is not None:
        try:
            lock = inputs.start.directory.lock()
            check_same_experiment(inputs.start, record, new_effective_batch=inputs.arguments.new_effective_batch)
        except ConfigError as error:
            answer = [error]
    dist.broadcast_object_list(answer)
    if isinstance(answer[0], ConfigError):
        raise answer[0]
    return answer[0], lock


def _check_steps(inputs: Inputs, start: Start, checkpoint: Checkpoint) -> None:
    steps = inputs.experiment.run.steps
    if checkpoint.step > steps:
        raise ConfigError(
            f"its run stands at step {checkpoint.step} already",
            source=str(start.directory.path if start.directory else None),
            key="run.steps",
            value=steps,
            fix=f"--steps {checkpoint.step} or more",
        )


def _origin(inputs: Inputs, checkpoint: Checkpoint | None) -> StreamOrigin:
    """Where windows begin; another effective batch begins where the old one's next window would have."""
    if checkpoint is None:
        return StreamOrigin()
    manifest = checkpoint.manifest
    if manifest.split.total == inputs.deepspeed.batch.total:
        return manifest.origin
    before = inputs.window_order(manifest.origin, manifest.split.total)
    return StreamOrigin(window=checkpoint.step, position=before.position_of(checkpoint.step))


def _told(inputs: Inputs, checkpoint: Checkpoint) -> str:
    line = f"continued       from step {checkpoint.step} ({checkpoint.path})"
    then, now = checkpoint.manifest.split, Split.of(inputs.deepspeed.batch)
    if then.total != now.total:
        return f"{line}; from here on with an effective batch of {now.total}, before of {then.total}"
    if then != now:
        return f"{line}; before as {then.world_size} x {then.accumulation_steps} x {then.micro_batch}"
    return line


def _entry(checkpoint: Checkpoint, record: dict[str, Any]) -> dict[str, Any]:
    return {
        "step": checkpoint.step,
        "checkpoint": checkpoint.path.name,
        "split_before": checkpoint.manifest.split.model_dump(),
        "versions_before": checkpoint.manifest.versions,
        "effective_batch": record["effective_batch"],
        "command": record["command"],
    }
