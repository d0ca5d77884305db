"""The largest micro-batch that should fit, as ``dsaccum plan`` finds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from dsaccum.config.errors import ConfigError
from dsaccum.planning.engines.layout import Device
from dsaccum.planning.fakes import FakeRun
from dsaccum.planning.fit import Candidate
from dsaccum.planning.settings import EngineSettings
from dsaccum.planning.ways import Way
from dsaccum.report.figures import size
from dsaccum.training.micro_batch import Known, samples_of_a_rank

if TYPE_CHECKING:
    from dsaccum.training.inputs import Inputs

_SHOWN = 200


def largest_micro_batch(inputs: Inputs, memory_bytes: int, moved: Callable[[], None]) -> Known:
    """B, and in a few words why.

    Where no plan can be made, all samples of a rank on a GPU, whose allocator says when memory has run out; and 1 on a
    CPU, where the system kills the process.

    Args:
        inputs: of the run, its E not yet split.
        memory_bytes: of the rank that has least.
        moved: told that this rank moves.
    """
    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    samples = samples_of_a_rank(inputs.deepspeed.batch)
    try:
        candidate = _candidate(inputs, samples, device)
        moved()
        best = candidate.best(memory_bytes)
    except Exception as error:  # a model that trains need not run without storage
        problem = error.problem if isinstance(error, ConfigError) else " ".join(str(error).split())
        return samples if device == "cuda" else 1, f"no plan can be made: {problem[:_SHOWN]}"
    moved()
    if best is None:
        return 1, f"the plan finds no room even for that in {size(memory_bytes)}"
    return best.micro_batch, f"planned: {size(best.peaks.peak.total)} of {size(memory_bytes)} on each rank"


def _candidate(inputs: Inputs, samples: int, device: Device) -> Candidate:
    experiment, config = inputs.experiment, inputs.deepspeed.config
    settings = EngineSettings.of(config, device)
    checkpointing = experiment.model.activation_checkpointing
    run = FakeRun(experiment, inputs.data.tokenizer, inputs.arguments.experiment)
    run.model(checkpointing=checkpointing)
    return Candidate(
        Way(settings.stage, settings.numerics.precision, checkpointing),
        config,
        settings,
        run,
        sequence_length=experiment.data.sequence_length,
        world_size=inputs.deepspeed.batch.world_size,
        samples=samples,
    )
