"""From the user's files to a case: everything is read, checked and fitted to this machine before a rank is started."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from dsaccum.batch import MICRO_BATCH_KEY, STEPS_KEY, TOTAL_KEY, EffectiveBatch
from dsaccum.config.auto import unused_auto_values
from dsaccum.config.deepspeed import DeepSpeedSettings, resolve_deepspeed_config
from dsaccum.config.errors import ConfigError, located_in
from dsaccum.config.experiment import DataConfig, Experiment
from dsaccum.config.keys import check_keys
from dsaccum.config.loading import load_experiment, overrides_named
from dsaccum.config.reading import read_json_object
from dsaccum.config.schema import DeepSpeedSchema, Machine
from dsaccum.data import Samples, WindowOrder, load_data
from dsaccum.engine.schema import installed_schema
from dsaccum.loss import SummedLoss, build_loss
from dsaccum.probe import check_causal_language_model
from dsaccum.verification.cases.arguments import VerifyArguments
from dsaccum.verification.cases.case import Case, OrderRule, Vocabulary, WindowChoice
from dsaccum.verification.cases.shrink import MOST_SECONDS, Work, fit_model
from dsaccum.verification.cases.substitutions import substitute, verified_batch, with_small_buckets
from dsaccum.verification.cases.windows import (
    MOST_WARM_UP_STEPS,
    cut_samples,
    ids_in_use,
    keep_samples,
    needed_samples,
    plan_windows,
    probe_samples,
    shorter_lengths,
    steps_to_verify,
)

_DEFAULT_RANKS: Final = 2
_SHIPPED_EXPERIMENT: Final = Path("launch/experiments/stdlib-nano.yaml")
_BUILT_IN_EXPERIMENT: Final = Path(__file__).with_name("default_experiment.yaml")


@dataclass(frozen=True)
class PreparedCase:
    """A case, and what this process needs for it.

    Attributes:
        case: for the ranks.
        model: the verified one, plain, float32, on the CPU, in training mode.
        loss: the user's own; None for next-token cross entropy.
        substitutions: what is verified in place of what was written, one line each.
        unavailable: those of them that this machine made necessary.
        warnings: what may not be what was meant, one line each.
        parameters: of the verified model.
        data: what was read, as in a run's record (JSON types only).
    """

    case: Case
    model: nn.Module
    loss: SummedLoss | None
    substitutions: list[str]
    unavailable: list[str]
    warnings: list[str]
    parameters: int
    data: dict[str, Any]


class _Fed(NamedTuple):
    """What the case's steps are fed."""

    order: OrderRule
    windows: tuple[WindowChoice, ...]
    samples: Samples
    probe_samples: Samples


def read_case(arguments: VerifyArguments) -> PreparedCase:
    """Read the JSON, the experiment, the data and the model, and say what is verified. Changes nothing on disk.

    Raises:
        ConfigError: whatever the user can mend.
    """
    with overrides_named(arguments.overrides):
        return _read(arguments)


def _read(arguments: VerifyArguments) -> PreparedCase:
    schema = installed_schema()
    source = str(_experiment_file(arguments.experiment))
    experiment = load_experiment(source, arguments.overrides)
    settings, rescaled, unavailable, warnings = _read_settings(arguments, experiment, schema)
    loss = None if experiment.loss.factory is None else build_loss(experiment.loss.factory, source=source)
    rates = schema.rehearse(settings.config, max(arguments.steps, MOST_WARM_UP_STEPS))
    steps, at_rate_zero = steps_to_verify(arguments.steps, rates)
    data = load_data(experiment.data, source)
    vocabulary = Vocabulary(len(data.tokenizer), data.tokenizer.end_token, data.tokenizer.pad_token)
    work = Work(settings.batch, steps)
    lengths = shorter_lengths(data.samples)
    fitted = fit_model(experiment, vocabulary, work, lengths, source, full_size=arguments.full_size)
    verified = fitted.experiment
    if loss is None:
        check_causal_language_model(fitted.model, vocabulary.size, verified.data.sequence_length, source)
    fed = _feed(data.samples, verified.data, vocabulary, settings.batch, steps, source)
    config, about_buckets = with_small_buckets(
        settings.config, fitted.trained_sizes, fitted.share, settings.batch.world_size
    )
    case = Case(
        experiment=verified,
        source=source,
        config=config,
        batch=settings.batch,
        zero_stage=settings.zero_stage,
        precision=settings.precision,
        accumulation_dtype=settings.accumulation_dtype,
        gradient_clipping=settings.gradient_clipping,
        vocabulary=vocabulary,
        order=fed.order,
        samples=fed.samples,
        probe_samples=fed.probe_samples,
        windows=fed.windows,
        loop=arguments.loop,
        remedies=arguments.remedies,
    )
    seconds = work.seconds(fitted.parameters, fed.samples.sequence_length)
    about_the_case = [*_about_one_micro_step(settings.batch), *at_rate_zero, *_about_time(seconds)]
    return PreparedCase(
        case=case,
        model=fitted.model,
        loss=loss,
        substitutions=[*rescaled, *unavailable, *fitted.notes, *about_buckets],
        unavailable=unavailable,
        warnings=[*warnings, *about_the_case],
        parameters=fitted.parameters,
        data=data.description,
    )


def _experiment_file(named: Path | None) -> Path:
    if named is not None:
        return named
    return _SHIPPED_EXPERIMENT if _SHIPPED_EXPERIMENT.is_file() else _BUILT_IN_EXPERIMENT


def _read_settings(
    arguments: VerifyArguments, experiment: Experiment, schema: DeepSpeedSchema
) -> tuple[DeepSpeedSettings, list[str], list[str], list[str]]:
    """The JSON resolved; how its batch was rescaled, what this machine cannot run, and what is worth a warning."""
    written = read_json_object(arguments.deepspeed)
    ranks = _ranks(arguments.ranks, schema.machine)
    with located_in(arguments.deepspeed):
        check_keys(written, schema)
        batch, rescaled = verified_batch(written, ranks, arguments.accumulation_steps, arguments.micro_batch)
        substituted, substitutions = substitute(written, schema.machine)
    numbers = {TOTAL_KEY: batch.total, STEPS_KEY: batch.accumulation_steps, MICRO_BATCH_KEY: batch.micro_batch}
    settings = resolve_deepspeed_config(
        substituted | numbers, arguments.deepspeed, schema=schema, experiment=experiment, world_size=ranks
    )
    # The default experiment has a value for many an "auto"; that a JSON does not ask for all of them is no news.
    unused = unused_auto_values(substituted, experiment) if arguments.experiment is None else []
    return settings, rescaled, substitutions, [line for line in settings.warnings if line not in unused]


def likely_ranks() -> int:
    """W where none is asked for: two where there are two cores (two GPUs)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_DEFAULT_RANKS, torch.cuda.device_count() or cores)


def _ranks(wanted: int | None, machine: Machine) -> int:
    """W, as asked for if there are so many GPUs."""
    devices = torch.cuda.device_count()
    if machine.device == "cuda" and wanted is not None and wanted > devices:
        problem = "is more than there are GPUs, and ranks do not share one"
        raise ConfigError(problem, key="--ranks", value=wanted, allowed=f"1 to {devices}", fix=f"--ranks {devices}")
    return wanted or likely_ranks()


def _feed(
    samples: Samples, config: DataConfig, vocabulary: Vocabulary, batch: EffectiveBatch, steps: int, source: str
) -> _Fed:
    """Windows of the verified length, and no more of the data than they hold."""
    order = WindowOrder(len(samples), batch.total, config.last_window, config.seed, source)
    rule, windows = OrderRule(len(samples), config.last_window, config.seed), plan_windows(order, steps)
    cut = samples if config.sequence_length == samples.sequence_length else cut_samples(samples, config.sequence_length)
    kept = keep_samples(cut, needed_samples(rule, batch.total, windows))
    return _Fed(rule, windows, kept, probe_samples(kept, ids_in_use(samples, vocabulary.size), config.seed))


def _about_one_micro_step(batch: EffectiveBatch) -> list[str]:
    nothing = "N = 1: nothing is accumulated, and of accumulation nothing is verified; --accum-steps 4 would"
    return [nothing] if batch.accumulation_steps == 1 else []


def _about_time(seconds: float) -> list[str]:
    return [f"the reference computes for about {seconds:.0f} s on one core"] if seconds > MOST_SECONDS else []
