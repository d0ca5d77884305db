"""From the user's files to a case: everything is read, checked and fitted to this machine before a rank is started."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
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
from dsaccum.data import Data, Samples, WindowOrder, load_data
from dsaccum.engine.schema import installed_schema
from dsaccum.loss import SummedLoss, build_loss
from dsaccum.probe import check_causal_language_model
from dsaccum.verification.cases.arguments import VerifyArguments
from dsaccum.verification.cases.case import Case, OrderRule, Vocabulary, WindowChoice
from dsaccum.verification.cases.saved_state import SavedState
from dsaccum.verification.cases.shrink import Patience, Work, fit_model
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
        saved: what the reference goes on from, where the case does.
    """

    case: Case
    model: nn.Module
    loss: SummedLoss | None
    substitutions: list[str]
    unavailable: list[str]
    warnings: list[str]
    parameters: int
    data: dict[str, Any]
    saved: SavedState | None = None


class _Fed(NamedTuple):
    """What the case's steps are fed."""

    order: OrderRule
    windows: tuple[WindowChoice, ...]
    samples: Samples
    probe_samples: Samples


@dataclass(frozen=True)
class Sources:
    """What the user's files hold besides the JSON.

    Attributes:
        experiment: as it was written.
        source: its file, for messages.
        data: what its ``data`` section stands for.
        loss: the user's own; None for next-token cross entropy.
    """

    experiment: Experiment
    source: str
    data: Data
    loss: SummedLoss | None


@dataclass(frozen=True)
class Stepping:
    """How the case steps: the JSON as it is verified.

    Attributes:
        settings: the JSON, resolved.
        steps: optimizer steps, so many that two updates change something.
        rescaled: how its batch was changed, one line each.
        unavailable: what this machine cannot run, one line each.
        warnings: what may not be what was meant, one line each.
    """

    settings: DeepSpeedSettings
    steps: int
    rescaled: list[str]
    unavailable: list[str]
    warnings: list[str]


@dataclass(frozen=True)
class Wanted:
    """What a verification is asked for beside its files.

    Attributes:
        loop: ``dsaccum``, ``hf-labels``, ``outside-loss``, or ``FILE.py:function``.
        remedies: whether our remedies for DeepSpeed's faults are applied.
        full_size: whether a large model is verified as it is, not as a shrunk copy.
        patience: with the reference.
    """

    loop: str = "dsaccum"
    remedies: bool = True
    full_size: bool = False
    patience: Patience = field(default_factory=Patience)


def read_case(arguments: VerifyArguments) -> PreparedCase:
    """Read the JSON, the experiment, the data and the model, and say what is verified. Changes nothing on disk.

    Raises:
        ConfigError: whatever the user can mend.
    """
    with overrides_named(arguments.overrides):
        stepping, sources = read_sources(arguments)
        wanted = Wanted(arguments.loop, arguments.remedies, arguments.full_size)
        return prepare_case(stepping, sources, wanted)


def read_sources(arguments: VerifyArguments) -> tuple[Stepping, Sources]:
    """Read the JSON and the files beside it, without a model. To be called inside ``overrides_named``.

    Raises:
        ConfigError: whatever the user can mend.
    """
    schema = installed_schema()
    source = str(_experiment_file(arguments.experiment))
    experiment = load_experiment(source, arguments.overrides)
    stepping = plan_stepping(
        read_json_object(arguments.deepspeed),
        arguments.deepspeed,
        experiment,
        schema,
        ranks=ranks_for(arguments.ranks, schema.machine),
        accumulation_steps=arguments.accumulation_steps,
        micro_batch=arguments.micro_batch,
        steps=arguments.steps,
    )
    if arguments.experiment is None:
        # The default one has a value for many an "auto"; that a JSON does not ask for all of them is no news.
        unused = unused_auto_values(stepping.settings.config, experiment)
        stepping = replace(stepping, warnings=[line for line in stepping.warnings if line not in unused])
    loss = None if experiment.loss.factory is None else build_loss(experiment.loss.factory, source=source)
    return stepping, Sources(experiment, source, load_data(experiment.data, source), loss)


def plan_stepping(
    written: dict[str, Any],
    config_file: Path,
    experiment: Experiment,
    schema: DeepSpeedSchema,
    *,
    ranks: int,
    accumulation_steps: int | None,
    micro_batch: int | None,
    steps: int,
    updates_before: int = 0,
) -> Stepping:
    """Resolve the JSON for so many ranks on this machine.

    Args:
        written: the JSON.
        config_file: where it stands, for messages.
        experiment: has the values for its ``"auto"``.
        schema: of the installed DeepSpeed on this machine.
        ranks: W.
        accumulation_steps: N instead of the JSON's.
        micro_batch: B instead of the JSON's.
        steps: optimizer steps that are wanted at least.
        updates_before: that the run has made, where one goes on.

    Raises:
        ConfigError: the first mistake.
    """
    with located_in(config_file):
        check_keys(written, schema)
        batch, rescaled = verified_batch(written, ranks, accumulation_steps, micro_batch)
        substituted, unavailable = substitute(written, schema.machine)
    numbers = {TOTAL_KEY: batch.total, STEPS_KEY: batch.accumulation_steps, MICRO_BATCH_KEY: batch.micro_batch}
    settings = resolve_deepspeed_config(
        substituted | numbers, config_file, schema=schema, experiment=experiment, world_size=ranks
    )
    rates = schema.rehearse(settings.config, updates_before + max(steps, MOST_WARM_UP_STEPS))[updates_before:]
    steps, at_rate_zero = steps_to_verify(steps, rates)
    warnings = [*settings.warnings, *_about_one_micro_step(batch), *at_rate_zero]
    return Stepping(settings, steps, rescaled, unavailable, warnings)


def prepare_case(stepping: Stepping, sources: Sources, wanted: Wanted) -> PreparedCase:
    """A case, with a model that is small enough to verify in time.

    Raises:
        ConfigError: the model cannot be built, or is no causal language model.
    """
    settings, experiment, source = stepping.settings, sources.experiment, sources.source
    samples, tokenizer = sources.data.samples, sources.data.tokenizer
    vocabulary = Vocabulary(len(tokenizer), tokenizer.end_token, tokenizer.pad_token)
    work = Work(settings.batch, stepping.steps, wanted.patience)
    lengths = shorter_lengths(samples)
    fitted = fit_model(experiment, vocabulary, work, lengths, source, full_size=wanted.full_size)
    verified = fitted.experiment
    if sources.loss is None:
        check_causal_language_model(fitted.model, vocabulary.size, verified.data.sequence_length, source)
    fed = _feed(samples, verified.data, vocabulary, settings.batch, stepping.steps, source)
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
        loop=wanted.loop,
        remedies=wanted.remedies,
    )
    return PreparedCase(
        case=case,
        model=fitted.model,
        loss=sources.loss,
        substitutions=[*stepping.rescaled, *stepping.unavailable, *fitted.notes, *about_buckets],
        unavailable=stepping.unavailable,
        warnings=[*stepping.warnings, *_about_time(work, fitted.parameters, fed.samples.sequence_length)],
        parameters=fitted.parameters,
        data=sources.data.description,
    )


def _experiment_file(named: Path | None) -> Path:
    if named is not None:
        return named
    return _SHIPPED_EXPERIMENT if _SHIPPED_EXPERIMENT.is_file() else _BUILT_IN_EXPERIMENT


def likely_ranks() -> int:
    """W where none is asked for: two where there are two cores (two GPUs)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_DEFAULT_RANKS, torch.cuda.device_count() or cores)


def ranks_for(wanted: int | None, machine: Machine) -> int:
    """W, as asked for if there are so many GPUs.

    Raises:
        ConfigError: there are not.
    """
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


def _about_time(work: Work, parameters: int, sequence_length: int) -> list[str]:
    if not work.is_too_long(parameters, sequence_length):
        return []
    return [f"the reference computes for about {work.seconds(parameters, sequence_length):.0f} s on one core"]
