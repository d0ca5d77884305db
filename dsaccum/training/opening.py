"""The first lines of a run: the equation of its batch, the model, the data, and what DeepSpeed is told."""

from __future__ import annotations

import platform
import sys
from typing import TYPE_CHECKING, Any

from dsaccum.batch import EffectiveBatch
from dsaccum.engine.process import Ranks

if TYPE_CHECKING:
    from dsaccum.training.inputs import Inputs


def describe(inputs: Inputs) -> list[str]:
    """One line each; figures are those of the resolved configs."""
    experiment, deepspeed, data = inputs.experiment, inputs.deepspeed, inputs.data
    sizes = inputs.parameters
    trained = "" if sizes["trained"] == sizes["total"] else f", {sizes['trained']:,} of them trained"
    return [
        batch_equation(deepspeed.batch, experiment.data.sequence_length, padded=data.samples.padded),
        f"model           {type(inputs.model).__name__}, {sizes['total']:,} parameters{trained}",
        f"precision       {deepspeed.precision}, gradients accumulated in {deepspeed.accumulation_dtype}, "
        f"ZeRO stage {deepspeed.zero_stage}, clipping {deepspeed.gradient_clipping or 'off'}",
        f"data            {experiment.data.source}: {len(data.samples):,} samples of {experiment.data.sequence_length} "
        f"tokens, {len(data.held_out):,} held out; {inputs.order.windows_per_epoch:,.1f} optimizer steps an epoch",
        "versions        " + ", ".join(f"{name} {version}" for name, version in installed_versions().items()),
    ]


def data_warnings(inputs: Inputs) -> list[str]:
    """What runs and may not be what was meant about the data."""
    samples, total = len(inputs.data.samples), inputs.deepspeed.batch.total
    if samples >= total:
        return []
    short = inputs.experiment.data.last_window == "short"
    consequence = "every window is a short one" if short else "each window sees some of them again"
    return [f"an epoch has {samples:,} samples, fewer than one window of {total:,}: {consequence}"]


def batch_equation(batch: EffectiveBatch, sequence_length: int, *, padded: bool) -> str:
    """``effective batch = 2 ranks x 4 accumulation steps x 4 micro-batch = 32 samples, 8,192 tokens``."""
    return (
        f"effective batch = {_counted(batch.world_size, 'rank')} x "
        f"{_counted(batch.accumulation_steps, 'accumulation step')} x {batch.micro_batch} micro-batch = "
        f"{_counted(batch.total, 'sample')}, {'at most ' if padded else ''}{batch.total * sequence_length:,} tokens"
    )


def installed_versions() -> dict[str, str]:
    """Of everything that a figure of this run depends on."""
    from importlib.metadata import version

    def loaded(name: str) -> str:
        # What runs may be another than what is installed, e.g. a checkout on PYTHONPATH.
        return getattr(sys.modules.get(name), "__version__", None) or version(name)

    packages = ("dsaccum", "torch", "deepspeed", "transformers")
    return {**{name: str(loaded(name)) for name in packages}, "python": platform.python_version()}


def run_record(
    inputs: Inputs, ranks: Ranks, command: list[str], preflight: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What ``run.json`` keeps: resolved configs, versions, the data's hash; enough to run the same again.

    Args:
        inputs: of the run.
        ranks: this process's place.
        command: the flags.
        preflight: what it found; None where it was off.
    """
    batch = inputs.deepspeed.batch
    return {
        "schema": "dsaccum.train/1",
        "name": inputs.experiment.name,
        "experiment": inputs.experiment.model_dump(mode="json"),
        "deepspeed": inputs.deepspeed.config,
        "effective_batch": {
            "world_size": ranks.world_size,
            "micro_batch": batch.micro_batch,
            "accumulation_steps": batch.accumulation_steps,
            "total": batch.total,
        },
        "parameters": inputs.parameters,
        "versions": installed_versions(),
        "command": command,
        "data": inputs.data.description,
        "preflight": preflight,
        "continued": [],
        "split_anew": [],
    }


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
