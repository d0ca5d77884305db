"""Where a run begins: in a directory of its own, or where a run of the same experiment stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsaccum.config.errors import ConfigError
from dsaccum.training.identity import differences
from dsaccum.training.run_directory import RunDirectory, check_new_directory

SHOWN = 3


@dataclass(frozen=True)
class Start:
    """What was asked for, and what is there.

    Attributes:
        directory: of the run that is continued; None to begin anew.
        record: its ``run.json``.
    """

    directory: RunDirectory | None = None
    record: Mapping[str, Any] = field(default_factory=dict)


def find_start(resume: str, output_directory: str | None) -> Start:
    """Look for a run to continue; changes nothing.

    Args:
        resume: ``auto``, ``never``, or a run's directory.
        output_directory: as given; None for a fresh one of our choice.

    Raises:
        ConfigError: the directory can't be used, or there is no run to continue in it.
    """
    if resume not in ("auto", "never"):
        return _named(resume, output_directory)
    if resume == "auto" and output_directory is not None:
        directory = RunDirectory(Path(output_directory))
        record = directory.read_record()
        if record is not None:
            return Start(directory, record)
    check_new_directory(output_directory)
    return Start()


def _named(resume: str, output_directory: str | None) -> Start:
    place: dict[str, Any] = {"source": "--resume", "key": resume}
    if output_directory is not None and Path(output_directory).absolute() != Path(resume).absolute():
        raise ConfigError("is another directory than --output-dir", **place, fix="give one of the two")
    directory = RunDirectory(Path(resume))
    record = directory.read_record()
    if record is None:
        raise ConfigError(
            "holds no run (no run.json that can be read)", **place, fix="the directory that the run itself named"
        )
    return Start(directory, record)


def check_same_experiment(start: Start, record: Mapping[str, Any], *, new_effective_batch: bool) -> None:
    """Whether the run that is there may be continued as this one.

    Args:
        start: with a directory.
        record: what this run's ``run.json`` would say.
        new_effective_batch: whether another effective batch is wanted.

    Raises:
        ConfigError: it is another experiment, has another effective batch, or is finished.
    """
    assert start.directory is not None
    place: dict[str, Any] = {"source": str(start.directory.path)}
    found = differences(start.record, record)
    if found:
        told = ", ".join(f"{name} = {_short(now)} (there: {_short(then)})" for name, then, now in found[:SHOWN])
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise ConfigError(
            f"it holds a run of another experiment: {told}{more}",
            **place,
            fix=f"{_same(start.record, record, found)}, or another --output-dir",
        )
    then, now = _total(start.record), _total(record)
    if then != now and not new_effective_batch:
        raise ConfigError(
            f"its run has an effective batch of {then}, this one {now}",
            **place,
            fix=f"--accum-steps or --micro-batch so that W x N x B = {then}, or --new-effective-batch",
        )
    done = start.record.get("steps_done", 0)
    if start.record.get("status") == "finished" and record["experiment"]["run"]["steps"] <= done:
        raise ConfigError(
            f"it holds a finished run of {done} steps",
            **place,
            fix="more --steps to continue it, where the schedule's length is not theirs, or another --output-dir",
        )


def _same(then: Mapping[str, Any], now: Mapping[str, Any], found: list[tuple[str, Any, Any]]) -> str:
    """What makes the values equal: it is one flag where they follow it."""
    steps = _steps(then), _steps(now)
    if all((one, other) == steps for _, one, other in found):
        return f"--steps {steps[0]}, which the schedule's length follows"
    return "the same values"


def _steps(record: Mapping[str, Any]) -> Any:
    experiment = record.get("experiment")
    run = experiment.get("run") if isinstance(experiment, Mapping) else None
    return run.get("steps") if isinstance(run, Mapping) else None


def _total(record: Mapping[str, Any]) -> Any:
    batch = record.get("effective_batch")
    return batch.get("total") if isinstance(batch, Mapping) else None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
