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
from dsaccum.training.metrics import StepMetrics, read_metrics
from dsaccum.training.run_directory import RunDirectory
from dsaccum.training.start import Start, check_same_experiment


@dataclass(frozen=True)
class Continuation:
    """A run that goes on, the same on all ranks.

    Attributes:
        directory: of the run.
        checkpoint: None where the run ended before its first: it begins again, in the same directory.
        origin: of the coming windows in the stream.
        metrics: rank 0's, of the steps that were done.
        continued: what ``run.json`` says of all times that the run was continued.
        split_anew: and of those that memory ran out, in windows that are done.
        lock: rank 0's, which keeps other runs out.
    """

    directory: RunDirectory
    checkpoint: Checkpoint | None
    origin: StreamOrigin
    metrics: tuple[StepMetrics, ...]
    continued: list[dict[str, Any]]
    split_anew: list[dict[str, Any]]
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
    metrics = _agree_on_metrics(start, checkpoint, ranks)
    origin = _origin(inputs, checkpoint)
    continued = list(start.record.get("continued", []))
    if checkpoint is not None:
        _check_steps(inputs, start, checkpoint)
        note(_told(inputs, checkpoint))
        continued.append(_entry(checkpoint, record))
    else:
        note(f"continued       {start.directory.path} has no checkpoint yet: from the beginning")
    done = checkpoint.step if checkpoint is not None else 0
    split_anew = [entry for entry in start.record.get("split_anew", []) if entry["step"] <= done]
    return Continuation(start.directory, checkpoint, origin, metrics, continued, split_anew, lock)


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


def _agree_on_metrics(start: Start, checkpoint: Checkpoint | None, ranks: Ranks) -> tuple[StepMetrics, ...]:
    """Rank 0 reads what was written down; all learn what is wrong with it."""
    answer: list[ConfigError | None] = [None]
    steps: tuple[StepMetrics, ...] = ()
    if ranks.is_first:
        try:
            steps = _metrics_of_before(start, checkpoint)
        except ConfigError as error:
            answer = [error]
    dist.broadcast_object_list(answer)
    if answer[0] is not None:
        raise answer[0]
    return steps


def _metrics_of_before(start: Start, checkpoint: Checkpoint | None) -> tuple[StepMetrics, ...]:
    """Of a run whose checkpoints are gone nothing is overwritten."""
    assert start.directory is not None
    if checkpoint is None:
        done = start.record.get("steps_done")
        if done:
            problem = f"its run has done {done} steps, and there is no checkpoint to continue it from"
            fix = f"put {start.directory.checkpoints} back, or another --output-dir"
            raise ConfigError(problem, source=str(start.directory.path), fix=fix)
        return ()
    path = start.directory.metrics
    try:
        steps = read_metrics(path, checkpoint.manifest.metrics_bytes)
        if len(steps) != checkpoint.step:
            raise ValueError(f"{len(steps)} lines, and {checkpoint.step} steps were done")
    except (OSError, ValueError) as error:
        problem = f"is not what it was when the checkpoint was made ({getattr(error, 'strerror', None) or error})"
        raise ConfigError(problem, source=str(path), fix="put the file back, or another --output-dir") from error
    return tuple(steps)


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
