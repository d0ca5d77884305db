"""The first micro-batch: the one that was found to fit before, or the largest that a plan finds to fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dsaccum.config.errors import ConfigError
from dsaccum.engine.process import Ranks
from dsaccum.report.figures import size
from dsaccum.sizing import kept
from dsaccum.sizing.free_memory import plannable_bytes

if TYPE_CHECKING:
    from dsaccum.training.inputs import Inputs

Answer = tuple[int, str]
_SHOWN = 200


def first_micro_batch(inputs: Inputs, ranks: Ranks, moved: Callable[[], None]) -> Answer:
    """B, a divisor of E / W, and why. A collective: rank 0 decides with what all ranks know."""
    known: list[Any] = [None] * ranks.world_size
    own = kept.find(inputs)
    dist.all_gather_object(known, (own.micro_batch if own else None, plannable_bytes(ranks)))
    answer: list[Answer | None] = [None]
    if ranks.is_first:
        found = [micro_batch for micro_batch, _ in known if micro_batch is not None]
        samples = inputs.deepspeed.batch.accumulation_steps * inputs.deepspeed.batch.micro_batch
        if found:
            answer = [(_divisor(samples, min(found)), f"more did not fit before: {kept.kept_file(inputs)}")]
        else:
            answer = [_planned(inputs, samples, min(memory for _, memory in known), moved)]
    dist.broadcast_object_list(answer)
    assert answer[0] is not None
    return answer[0]


def _divisor(samples: int, most: int) -> int:
    return max(rows for rows in range(1, min(samples, most) + 1) if samples % rows == 0)


def _planned(inputs: Inputs, samples: int, memory: int, moved: Callable[[], None]) -> Answer:
    from dsaccum.planning.engines.layout import Device
    from dsaccum.planning.fakes import FakeRun
    from dsaccum.planning.fit import Candidate
    from dsaccum.planning.settings import EngineSettings
    from dsaccum.planning.ways import Way

    experiment, config = inputs.experiment, inputs.deepspeed.config
    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        settings = EngineSettings.of(config, device)
        way = Way(settings.stage, settings.numerics.precision, experiment.model.activation_checkpointing)
        moved()
        run = FakeRun(experiment, inputs.data.tokenizer, inputs.arguments.experiment)
        candidate = Candidate(
            way,
            config,
            settings,
            run,
            sequence_length=experiment.data.sequence_length,
            world_size=inputs.deepspeed.batch.world_size,
            samples=samples,
        )
        run.model(checkpointing=way.checkpointing)
        moved()
        best = candidate.best(memory)
    except Exception as error:  # a model that trains need not run without storage
        return _unplanned(samples, device, error.problem if isinstance(error, ConfigError) else str(error))
    moved()
    if best is None:
        return 1, f"the plan finds no room for more in {size(memory)}"
    return best.micro_batch, f"planned: {size(best.peaks.peak.total)} of {size(memory)} on each rank"


def _unplanned(samples: int, device: str, problem: str) -> Answer:
    """Where memory can run out harmlessly, everything is tried first."""
    why = f"no plan can be made: {' '.join(problem.split())[:_SHOWN]}"
    return (samples, why) if device == "cuda" else (1, why)
