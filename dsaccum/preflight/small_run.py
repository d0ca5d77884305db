"""A small copy of a run: the same JSON and architecture, fewer and shorter rows, a smaller model; and its verdict."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import date
from typing import Final

from dsaccum.config.errors import ConfigError
from dsaccum.config.factories import place_of
from dsaccum.engine.schema import installed_schema
from dsaccum.preflight import kept
from dsaccum.preflight.check import Outcome
from dsaccum.preflight.own_ranks import OwnRanks
from dsaccum.report.figures import counted
from dsaccum.report.terminal import failure_text
from dsaccum.training.failure import is_communication
from dsaccum.training.inputs import Inputs
from dsaccum.training.outcome import RunFailed
from dsaccum.verification.cases.inputs import PreparedCase, Sources, Stepping, Wanted, plan_stepping, prepare_case
from dsaccum.verification.cases.shrink import Patience, Work
from dsaccum.verification.cases.substitutions import drop_observers
from dsaccum.verification.cases.windows import shorter_lengths
from dsaccum.verification.verify import Extent, examine, record_of, with_fault

STEPS: Final = 2
"""Optimizer steps: an update is told from the one before it. A schedule that starts at rate 0 takes more."""
MOST_ACCUMULATION_STEPS, MOST_ROWS = 4, 2
"""N and B of a larger window: what goes wrong with many micro-batches goes wrong with four."""
PATIENCE: Final = Patience(most_s=1.0, wanted_s=0.6)
LONGEST_S: Final = 20.0
"""A model that cannot be shrunk to less work than this, in seconds of one core, is left to ``dsaccum verify``."""
NO_OBSTACLES: Final = {"absent-gradient-decayed", "randomness-active"}
"""What DeepSpeed does to the big batch, too; and what leaves nothing to compare. Neither is wrong accumulation."""
CLIPPING: Final = 0.01
"""The limit of the copy where the run has a larger one: below the norms of its gradients, so that clipping acts."""
EXTENT: Final = Extent(memory="never", trajectory=False)


class _TooLong(Exception):
    """The model can be verified, but not in seconds."""


class _Moving:
    """Progress that nobody sees, but for the watchdog."""

    def __init__(self, moved: Callable[[], None]) -> None:
        self._moved = moved

    def stage(self, text: str) -> None:
        """This rank moves."""
        self._moved()

    def detail(self, text: str) -> None:
        """This rank moves."""
        self._moved()


def verify_now(inputs: Inputs, own: OwnRanks, key: str) -> Outcome:
    """Verify it on the run's ranks, and keep what was found if it is equivalent.

    Args:
        inputs: of the run.
        own: the ranks, of which this is the first.
        key: the fingerprint to keep it under.
    """
    started = time.perf_counter()
    try:
        prepared = _prepare(inputs)
    except (_TooLong, ConfigError) as reason:
        return _open(f"not verified: {reason}", key)
    try:
        examined = examine(prepared, own, _Moving(own.moved), EXTENT)
    except Exception as error:  # a model that trains need not run in float64, or on other rows
        if isinstance(error, RunFailed) or is_communication(error):
            raise
        return _open(f"not verified: {_in_one_line(error.__cause__ or error)}", key)
    record = record_of(prepared, examined, started)
    if record.verdict is None:
        return _open(f"no verdict: {record.why_undecided()}", key)
    if record.verdict == "not_equivalent" and all(cause.id in NO_OBSTACLES for cause in record.causes):
        return _open(f"no verdict: {'; '.join(f'{cause.id}, {cause.summary}' for cause in record.causes)}", key)
    if record.verdict == "not_equivalent":
        return Outcome({"verdict": "not_equivalent", "fingerprint": key}, "NOT EQUIVALENT", failure_text(record))
    trouble = kept.keep(key, record)
    batch = prepared.case.batch
    notes = [f"{time.perf_counter() - started:.1f} s", *prepared.unavailable, *([trouble] if trouble else [])]
    line = (
        f"equivalent: {counted(batch.accumulation_steps, 'micro-batch', 'es')} of {batch.micro_batch} on "
        f"{counted(batch.world_size, 'rank')} gave the update of one batch of {batch.total} ({'; '.join(notes)})"
    )
    return Outcome({"verdict": "equivalent", "verified_on": str(date.today()), "fingerprint": key}, line)


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place_of(error)}"


def _open(why: str, key: str) -> Outcome:
    """Nothing is known to be wrong, and the run goes on."""
    return Outcome({"verdict": None, "fingerprint": key, "reason": why}, f"{why}; the run goes on")


def _prepare(inputs: Inputs) -> PreparedCase:
    """The case; windows of at most ``MOST_ACCUMULATION_STEPS`` micro-batches of ``MOST_ROWS``.

    Raises:
        ConfigError: no such copy can be made.
        _TooLong: it could not be verified in seconds.
    """
    experiment, total = inputs.experiment, inputs.parameters["total"]
    stepping = _stepping(inputs)
    work = Work(stepping.settings.batch, stepping.steps, PATIENCE)
    shortest = min([experiment.data.sequence_length, *shorter_lengths(inputs.data.samples)])
    if experiment.model.factory is not None and work.seconds(total, shortest) > LONGEST_S:
        raise _TooLong("a model.factory keeps its size, and verifying it takes minutes: dsaccum verify does that")
    source = str(inputs.arguments.experiment)
    loss = None if experiment.loss.factory is None else inputs.loss
    prepared = prepare_case(stepping, Sources(experiment, source, inputs.data, loss), Wanted(patience=PATIENCE))
    if work.seconds(prepared.parameters, prepared.case.samples.sequence_length) > LONGEST_S:
        raise _TooLong("this model cannot be shrunk enough to be verified in seconds: dsaccum verify does it")
    return with_fault(prepared, None)


def _stepping(inputs: Inputs) -> Stepping:
    """The run's own config with a smaller window; N = W, where different mistakes look alike, is avoided."""
    batch = inputs.deepspeed.batch
    steps = min(batch.accumulation_steps, MOST_ACCUMULATION_STEPS)
    if steps == batch.world_size and steps > 2:
        steps -= 1
    config = drop_observers(inputs.deepspeed.config)
    if inputs.deepspeed.gradient_clipping > CLIPPING:
        config["gradient_clipping"] = CLIPPING
    return plan_stepping(
        config,
        inputs.deepspeed.source,
        inputs.experiment,
        installed_schema(),
        ranks=batch.world_size,
        accumulation_steps=steps,
        micro_batch=min(batch.micro_batch, MOST_ROWS),
        steps=STEPS,
    )
