"""From a run's directory to a case that goes on from its checkpoint, with the state that its reference goes on from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dsaccum.batch import MICRO_BATCH_KEY, STEPS_KEY, TOTAL_KEY, EffectiveBatch, resolve_batch_triangle
from dsaccum.config.auto import unused_auto_values
from dsaccum.config.errors import ConfigError
from dsaccum.config.schema import DeepSpeedSchema
from dsaccum.data import FILLER, Data, WindowOrder, load_data
from dsaccum.engine.schema import installed_schema
from dsaccum.loss import build_loss
from dsaccum.reference_samples import RawSamples, ReferenceSamples
from dsaccum.training.checkpoints.manifest import Split
from dsaccum.training.checkpoints.shelf import Checkpoint
from dsaccum.training.opening import installed_versions
from dsaccum.verification.cases.case import Case, ResumePoint, WindowChoice
from dsaccum.verification.cases.inputs import (
    PreparedCase,
    Sources,
    Stepping,
    Wanted,
    plan_stepping,
    prepare_case,
    ranks_for,
)
from dsaccum.verification.cases.saved_state import UnknownLayout, read_saved_state
from dsaccum.verification.cases.windows import MOST_WARM_UP_STEPS, keep_samples, updates_that_change
from dsaccum.verification.resumed.arguments import ResumeArguments
from dsaccum.verification.resumed.found_run import FoundRun, Steps, copy_checkpoint, find_run


def read_resumed_case(arguments: ResumeArguments, folder: Path) -> PreparedCase:
    """Read the run, its data and its model, and copy its checkpoint. Changes nothing outside the folder.

    Args:
        arguments: what was asked for.
        folder: an empty one, for the copy.

    Raises:
        ConfigError: whatever the user can mend.
    """
    run, schema = find_run(arguments.directory), installed_schema()
    ranks = ranks_for(arguments.ranks, schema.machine)
    checkpoint, steps, passed_over = copy_checkpoint(run, folder, lambda so_far: _goes_on(run, so_far, schema))
    batch = _split(arguments, checkpoint.manifest.split, ranks)
    stepping = _stepping(run, batch, steps, arguments.steps, schema)
    sources = _sources(run)
    wanted = Wanted(remedies=arguments.remedies, full_size=True)
    prepared = prepare_case(stepping, sources, wanted)
    case = _going_on(prepared.case, run, checkpoint, steps, sources.data, stepping.steps)
    shapes = {name: each.shape for name, each in prepared.model.named_parameters() if each.requires_grad}
    try:
        saved = read_saved_state(checkpoint, shapes)
    except UnknownLayout as error:
        problem = f"{checkpoint.path.name} is written in a layout that is not known here ({error})"
        raise ConfigError(problem, **_place(run)) from error
    warnings = [*passed_over, *_about_versions(checkpoint), *prepared.warnings]
    return replace(prepared, case=case, warnings=warnings, saved=saved)


def _place(run: FoundRun) -> dict[str, Any]:
    return {"source": "--resume", "key": str(run.directory.path)}


def _goes_on(run: FoundRun, so_far: Steps, schema: DeepSpeedSchema) -> bool:
    """Whether two of the next updates change anything: at a schedule's end the rate may stay 0."""
    rates = schema.rehearse(run.config, so_far.updates + MOST_WARM_UP_STEPS)[so_far.updates :]
    return updates_that_change(rates)


def _split(arguments: ResumeArguments, before: Split, ranks: int) -> EffectiveBatch:
    """The run's own E on so many ranks."""
    steps, rows = arguments.accumulation_steps, arguments.micro_batch
    if steps is None and rows is None:
        steps = before.accumulation_steps
    try:
        return resolve_batch_triangle(ranks, total=before.total, accumulation_steps=steps, micro_batch=rows)
    except ValueError as error:
        was = f"{before.world_size} x {before.accumulation_steps} x {before.micro_batch}"
        problem = f"{error}; the run's effective batch is {before.total} ({was}), and stays"
        raise ConfigError(problem, source="--resume", key=str(arguments.directory)) from None


def _stepping(run: FoundRun, batch: EffectiveBatch, so_far: Steps, wanted: int, schema: DeepSpeedSchema) -> Stepping:
    numbers = {TOTAL_KEY: batch.total, STEPS_KEY: batch.accumulation_steps, MICRO_BATCH_KEY: batch.micro_batch}
    stepping = plan_stepping(
        {**run.config, **numbers},
        run.record_file,
        run.experiment,
        schema,
        ranks=batch.world_size,
        accumulation_steps=batch.accumulation_steps,
        micro_batch=batch.micro_batch,
        steps=wanted,
        updates_before=so_far.updates,
    )
    # Every "auto" was resolved when the run began, so that none of the experiment's values is asked for any more.
    unused = unused_auto_values(stepping.settings.config, run.experiment)
    stepping = replace(stepping, warnings=[line for line in stepping.warnings if line not in unused])
    if stepping.unavailable:
        problem = f"the run can't go on here as it was: {stepping.unavailable[0]}"
        raise ConfigError(problem, **_place(run), fix="verify it on a machine like that of the run")
    return stepping


def _sources(run: FoundRun) -> Sources:
    """What the run read, if it is still the same."""
    source, experiment = str(run.record_file), run.experiment
    loss = None if experiment.loss.factory is None else build_loss(experiment.loss.factory, source=source)
    data = load_data(experiment.data, source)
    due, found = run.record["data"].get("sha256"), data.description.get("sha256")
    if due != found:
        problem = f"the data's content is not what the run has read (sha256 {str(found)[:12]}, then {str(due)[:12]})"
        raise ConfigError(problem, **_place(run), fix="the same files, data set and tokenizer")
    return Sources(experiment, source, data, loss)


def _going_on(case: Case, run: FoundRun, checkpoint: Checkpoint, so_far: Steps, data: Data, steps: int) -> Case:
    """The case on the run's next windows, as they are: a probe would be another run."""
    origin, first = checkpoint.manifest.origin, checkpoint.step
    indices = range(first, first + steps)
    nearby = tuple(
        index for index in (*range(steps), first - 1, first + steps) if index >= origin.window and index not in indices
    )
    order = WindowOrder(
        len(data.samples),
        case.batch.total,
        case.order.last_window,
        case.order.seed,
        case.source,
        first_window=origin.window,
        position=origin.position,
    )
    due = _reference_samples(case, data, so_far)  # a checkpoint may be wrong about where it stands
    ids = np.concatenate([each.sample_ids(index) for each in (order, due) for index in (*indices, *nearby)])
    kept = keep_samples(data.samples, np.unique(ids[ids != FILLER]))
    return replace(
        case,
        samples=kept,
        probe_samples=kept,
        windows=tuple(WindowChoice(index, probe=False) for index in indices),
        resumed=ResumePoint(str(run.directory.path), checkpoint, so_far.effective_batches, so_far.updates, nearby),
    )


def _reference_samples(case: Case, data: Data, so_far: Steps) -> ReferenceSamples:
    samples, batch = data.samples, case.batch
    raw = RawSamples(
        samples.tokens,
        samples.starts,
        samples.lengths,
        samples.prompt_lengths,
        padded=samples.padded,
        sequence_length=samples.sequence_length,
    )
    return ReferenceSamples(
        raw,
        seed=case.order.seed,
        last_window=case.order.last_window,
        accumulation_steps=batch.accumulation_steps,
        world_size=batch.world_size,
        micro_batch=batch.micro_batch,
        pad_token=case.vocabulary.pad_token,
        before=so_far.effective_batches,
    )


def _about_versions(checkpoint: Checkpoint) -> list[str]:
    now = installed_versions()
    others = [
        f"{name} {then} (now {now[name]})"
        for name, then in checkpoint.manifest.versions.items()
        if name in now and now[name] != then
    ]
    return [f"the checkpoint was written with {', '.join(others)}"] if others else []
