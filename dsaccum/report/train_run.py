"""A training run, read back from its directory: ``run.json`` and, for each optimizer step, a line of metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import AliasChoices, Field

from dsaccum.records import Number, Record, RecordPart
from dsaccum.report.figures import counted, numbered, plain
from dsaccum.verification.records.record import EffectiveBatchRecord


class TrainStep(RecordPart):
    """One line of ``metrics.jsonl``; what an older run did not write is null."""

    step: int
    tokens: int
    loss: Number = None
    learning_rate: Number = None
    gradient_norm: Number = None
    seconds: Number = None
    applied: bool = True
    effective_batch: int | None = None
    held_out_loss: Number = None


class TrainRecord(Record):
    """``run.json``. The steps are read from beside it, and are no part of its JSON."""

    schema_name: Literal["dsaccum.train/1"] = Field(
        validation_alias=AliasChoices("schema", "schema_name"),
        serialization_alias="schema",
        default="dsaccum.train/1",
    )
    status: str
    reason: str | None = None
    name: str
    held_out_loss: Number = None
    tokens_per_second: Number = None
    effective_batch: EffectiveBatchRecord
    parameters: dict[str, int] = Field(default_factory=dict)
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    experiment: dict[str, Any] = Field(default_factory=dict)
    data: dict[str, Any] = Field(default_factory=dict)
    preflight: dict[str, Any] | None = None
    continued: list[dict[str, Any]] = Field(default_factory=list)
    versions: dict[str, str] = Field(default_factory=dict)
    hardware: dict[str, Any] = Field(default_factory=dict)
    command: list[str] = Field(default_factory=list)
    steps: list[TrainStep] = Field(default_factory=list, exclude=True)

    @property
    def elapsed_s(self) -> float | None:
        """Of all steps, those before a continuation included."""
        return sum(step.seconds or 0.0 for step in self.steps) if self.steps else None


def read_steps(metrics: Path) -> list[TrainStep]:
    """All steps of ``metrics.jsonl``; none where the run has not come so far.

    The run may still be going on: a line that is not whole yet is left out.

    Raises:
        OSError: it cannot be read.
        ValueError: these are no such lines.
    """
    if not metrics.exists():
        return []
    *lines, _ = metrics.read_bytes().split(b"\n")
    return [TrainStep.model_validate_json(line) for line in lines]


_WORDS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "INTERRUPTED", "running": "RUNNING, or killed"}


def in_short(record: TrainRecord) -> str:
    """How it ended, in one sentence."""
    losses = [step.loss for step in record.steps if step.loss is not None]
    told = [counted(record.steps[-1].step, "step") if record.steps else "no step yet"]
    told += [f"loss {plain(losses[0], 3)} to {plain(losses[-1], 3)}"] if losses else []
    told += [f"held out {plain(record.held_out_loss, 3)}"] if record.held_out_loss is not None else []
    told += [record.reason] if record.reason else []
    return f"{_WORDS.get(record.status, record.status.upper())}: {', '.join(told)}"


def described(record: TrainRecord) -> dict[str, str]:
    """What was trained: by label, and nothing where there is nothing to say."""
    batch, config = record.effective_batch, record.deepspeed
    split = f"{counted(batch.accumulation_steps, 'micro-batch', 'es')} of {batch.micro_batch}"
    speed = record.tokens_per_second
    said = {
        "run": record.name,
        "parameters": f"{record.parameters['trained']:,}" if "trained" in record.parameters else "",
        "effective batch": f"{counted(batch.world_size, 'rank')} x {split} = {counted(batch.total, 'sample')}",
        "ZeRO stage": str((config.get("zero_optimization") or {}).get("stage", 0)),
        "optimizer": str((config.get("optimizer") or {}).get("type", "")),
        "data": str(record.data.get("source", "")),
        "tokens": f"{record.steps[-1].tokens:,}" if record.steps else "",
        "tokens/s": f"{speed:,.0f}" if speed is not None else "",
        "skipped": _skipped(record),
        "preflight": _preflight(record),
        "continued": counted(len(record.continued), "time") if record.continued else "",
    }
    return {label: text for label, text in said.items() if text}


def _skipped(record: TrainRecord) -> str:
    skipped = [step.step for step in record.steps if not step.applied]
    return f"{numbered('step', skipped)}: the gradient was not finite" if skipped else ""


def _preflight(record: TrainRecord) -> str:
    return "off" if record.preflight is None else str(record.preflight.get("verdict") or "no verdict")
