"""The DeepSpeed JSON: read strictly, checked whole before DeepSpeed sees it, and resolved to what it is given."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsaccum.batch import MICRO_BATCH_KEY, STEPS_KEY, TOTAL_KEY, EffectiveBatch
from dsaccum.config.advice import warnings_for
from dsaccum.config.auto import fill_auto, unused_auto_values
from dsaccum.config.combinations import check_combinations, look_up
from dsaccum.config.errors import ConfigError, located_in
from dsaccum.config.experiment import Experiment
from dsaccum.config.keys import check_keys
from dsaccum.config.optimizer import check_gradient_clipping, check_optimizer, check_scheduler
from dsaccum.config.precision import Precision, resolve_numerics
from dsaccum.config.reading import read_json_object
from dsaccum.config.schema import DeepSpeedSchema
from dsaccum.config.triangle import leaves_micro_batch_open, resolve_batch

_RATES_SHOWN = 8
_UPDATES_AHEAD = 1000
"""A schedule that is shorter than the run ends it; this many updates cost a tenth of a second."""


@dataclass(frozen=True)
class DeepSpeedSettings:
    """How to step: the JSON with nothing left open.

    Args:
        source: the file.
        config: what ``deepspeed.initialize`` gets: no ``"auto"``, and all three batch keys written out.
        batch: W, N and B.
        zero_stage: 0 to 3.
        precision: of forward and backward.
        accumulation_dtype: what gradients are accumulated in: fp32, bf16 or fp16.
        gradient_clipping: the limit of the gradient's norm, 0 for none.
        warnings: what runs and may not be what was meant, one line each.
        automatic: the JSON leaves N and B open; ``batch`` is E on these ranks in one micro-step, until it is decided.
    """

    source: Path
    config: dict[str, Any]
    batch: EffectiveBatch
    zero_stage: int
    precision: Precision
    accumulation_dtype: str
    gradient_clipping: float
    warnings: list[str]
    automatic: bool = False

    def split_as(self, batch: EffectiveBatch) -> DeepSpeedSettings:
        """The same, with another N and B."""
        return replace(self, config=self.config | _batch_keys(batch), batch=batch)


def load_deepspeed_config(
    path: str | Path,
    *,
    schema: DeepSpeedSchema,
    experiment: Experiment,
    world_size: int,
    accumulation_steps: int | None = None,
    micro_batch: int | None = None,
    may_be_automatic: bool = False,
) -> DeepSpeedSettings:
    """Read a DeepSpeed JSON and resolve it, see ``resolve_deepspeed_config``.

    Raises:
        ConfigError: the first mistake, with file, key, and the smallest fix. Nothing was started or written.
    """
    return resolve_deepspeed_config(
        read_json_object(Path(path)),
        path,
        schema=schema,
        experiment=experiment,
        world_size=world_size,
        accumulation_steps=accumulation_steps,
        micro_batch=micro_batch,
        may_be_automatic=may_be_automatic,
    )


def resolve_deepspeed_config(
    written: dict[str, Any],
    source: str | Path,
    *,
    schema: DeepSpeedSchema,
    experiment: Experiment,
    world_size: int,
    accumulation_steps: int | None = None,
    micro_batch: int | None = None,
    may_be_automatic: bool = False,
) -> DeepSpeedSettings:
    """Fill in what a DeepSpeed JSON leaves open, and check everything that can be checked before the start.

    When a flag is given, a stated ``train_batch_size`` (E) stays and the other two numbers move: ``--accum-steps``
    alone derives B from E and N, ``--micro-batch`` alone derives N from E and B. Both flags together compute E anew.

    Args:
        written: the JSON; it is not changed.
        source: its file, for messages.
        schema: what the installed DeepSpeed knows and this machine can run.
        experiment: the source of ``"auto"`` values, and of the run's length.
        world_size: data-parallel ranks (W).
        accumulation_steps: of the flag ``--accum-steps``.
        micro_batch: of the flag ``--micro-batch``.
        may_be_automatic: whether the caller decides on N and B where the JSON says ``"auto"`` and states E.

    Raises:
        ConfigError: the first mistake, with file, key, and the smallest fix. Nothing was started or written.
    """
    with located_in(source):
        check_keys(written, schema)
        automatic = may_be_automatic and leaves_micro_batch_open(written, accumulation_steps, micro_batch)
        batch, changes = resolve_batch(written, world_size, 1 if automatic else accumulation_steps, micro_batch)
        unused = unused_auto_values(written, experiment)
        config = fill_auto(written | _batch_keys(batch), experiment, schema)
        check_gradient_clipping(config)
        check_optimizer(config, schema)
        check_scheduler(config, schema)
        zero_stage = int(look_up(config, "zero_optimization.stage") or 0)
        check_combinations(config, zero_stage, schema)
        numerics = resolve_numerics(config, zero_stage, schema.machine)
        first_rates = _rehearse(config, experiment.run.steps, schema)[:_RATES_SHOWN]
    return DeepSpeedSettings(
        source=Path(source),
        config=config,
        batch=batch,
        zero_stage=zero_stage,
        precision=numerics.precision,
        accumulation_dtype=numerics.accumulation,
        gradient_clipping=float(config["gradient_clipping"]),
        warnings=changes + unused + warnings_for(config, numerics, experiment.run.steps, first_rates, schema),
        automatic=automatic,
    )


def _batch_keys(batch: EffectiveBatch) -> dict[str, int]:
    return {TOTAL_KEY: batch.total, STEPS_KEY: batch.accumulation_steps, MICRO_BATCH_KEY: batch.micro_batch}


def _rehearse(config: dict[str, Any], steps: int, schema: DeepSpeedSchema) -> list[float]:
    """DeepSpeed's own word on the resolved config, for what no check of ours has foreseen."""
    try:
        return schema.rehearse(config, min(steps, _UPDATES_AHEAD))
    except Exception as error:  # whatever its parser and its classes raise, a user's value caused it
        reason = str(error) or type(error).__name__
        raise ConfigError(f"DeepSpeed {schema.version} refuses it: {reason}; fix: change or delete that key") from None
