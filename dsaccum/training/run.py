"""A run, from inputs that have been checked to a saved model: join the ranks, train, save, report."""

from __future__ import annotations

import itertools
import os
import time
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import NoReturn

import torch.distributed as dist

from dsaccum.config.experiment import RunConfig
from dsaccum.engine.process import Ranks, start_process_group
from dsaccum.engine.window_engine import WindowEngine
from dsaccum.training import finish, opening
from dsaccum.training.assembly import Run, build_engine, build_keeper, build_loop, build_stream, open_run
from dsaccum.training.checkpoints.keeping import CheckpointKeeper
from dsaccum.training.checkpoints.manifest import Counters
from dsaccum.training.console import ConsoleProgress
from dsaccum.training.continuing import Continuation, agree_on_continuation
from dsaccum.training.failure import failures_named
from dsaccum.training.identity import everything
from dsaccum.training.inputs import Inputs
from dsaccum.training.journal import Journal
from dsaccum.training.micro_batch import AutomaticMicroBatch, Sizing, TryTheLargest, choose_micro_batch
from dsaccum.training.outcome import ExitCode, Interrupted, RunFailed
from dsaccum.training.preflight import Preflight
from dsaccum.training.run_directory import RunDirectory
from dsaccum.training.same_everywhere import check_same_everywhere
from dsaccum.training.stop_request import StopRequest
from dsaccum.training.watchdog import Watchdog

COLLECTIVE_MARGIN_S = 30.0
"""Collectives give up this much later than the watchdog, which knows better whom to name."""


def execute(
    inputs: Inputs,
    ranks: Ranks,
    *,
    command: list[str],
    started: float,
    preflight: Preflight | None = None,
    sizing: Sizing | None = None,
) -> ExitCode:
    """Join the other ranks, train, save, and report.

    Args:
        inputs: what was read.
        ranks: this process's place.
        command: the flags, for the record.
        started: ``time.perf_counter()`` when the process began.
        preflight: asked before the engine is built.
        sizing: asked where B starts if the JSON leaves it open; None to begin with the largest.

    Raises:
        NotEquivalent: the preflight found accumulation wrong.
        ConfigError: DeepSpeed or the file system refuses what was given.
        Interrupted: it was asked to stop, and can be continued.
        RunFailed: anything else that ends a run.
    """
    settings = inputs.experiment.run
    _join(ranks, settings.timeout_s)
    stop = _listen(settings, started)
    watchdog = Watchdog(ranks, settings.timeout_s, stop).start()
    journal: Journal | None = None
    try:
        with failures_named(ranks, watchdog):
            console = ConsoleProgress(settings.steps, is_first=ranks.is_first)
            inputs = choose_micro_batch(inputs, ranks, sizing or TryTheLargest(), console.note, watchdog.moved)
            _announce(inputs, console)
            record = opening.run_record(inputs, ranks, command)
            check_same_everywhere(everything(record), ranks)
            continuation = agree_on_continuation(inputs, ranks, record, console.note, watchdog.moved)
            record["preflight"] = None if preflight is None else preflight(inputs, ranks, watchdog, console.note)
            _stop_if_asked(inputs, ranks, stop, continuation, command)
            engine = build_engine(inputs, ranks, continuation)
            run = open_run(inputs, ranks, engine, console, record, continuation)
            journal = run.journal
            watchdog.on_end = stop.on_end = partial(journal.fail, speaks=True)
            keeper = build_keeper(inputs, ranks, engine, watchdog, run)
            stream, automatic = build_stream(inputs, ranks, run), None
            if inputs.deepspeed.automatic:
                automatic = AutomaticMicroBatch(inputs, ranks, engine, stream, sizing or TryTheLargest(), run.journal)
            loop = build_loop(inputs, ranks, engine, watchdog, stop, run, keeper, stream, automatic)
            with automatic.remembered(watchdog) if automatic is not None else nullcontext():
                counters = loop.run(settings.steps, settings.max_skipped, run.counters)
            if counters.step < settings.steps:
                _interrupt(inputs, ranks, stop, run, keeper, counters, command)
            keeper.save_at_the_end(counters)
            _finish(inputs, ranks, engine, watchdog, run, started, command)
    except RunFailed as failure:
        if journal is not None:
            journal.fail(str(failure), speaks=failure.own)
        raise
    watchdog.stop()
    dist.destroy_process_group()
    return ExitCode.DONE


def _listen(settings: RunConfig, started: float) -> StopRequest:
    stop = StopRequest().listen()
    if settings.max_minutes is not None:
        left = settings.max_minutes * 60 - (time.perf_counter() - started)
        stop.limit(left, f"its time limit of {settings.max_minutes:g} minutes (run.max_minutes)")
    return stop


def _reason(stop: StopRequest, ranks: Ranks) -> str | None:
    """The first rank's that was asked to stop. A collective."""
    reasons: list[str | None] = [None] * ranks.world_size
    dist.all_gather_object(reasons, stop.reason if stop.made else None)
    return next((reason for reason in reasons if reason), None)


def _stop_if_asked(
    inputs: Inputs, ranks: Ranks, stop: StopRequest, continuation: Continuation | None, command: list[str]
) -> None:
    """On all ranks, if one of them was asked to before there was anything to save."""
    reason = _reason(stop, ranks)
    if reason is None:
        return
    if continuation is None or continuation.checkpoint is None:
        raise RunFailed(f"stopped by {reason} before the first step; nothing was trained")
    raise _interrupted(inputs, reason, continuation.counters, continuation.directory, command)


def _interrupt(
    inputs: Inputs,
    ranks: Ranks,
    stop: StopRequest,
    run: Run,
    keeper: CheckpointKeeper,
    counters: Counters,
    command: list[str],
) -> NoReturn:
    """On all ranks: save, and say how to continue."""
    reason = _reason(stop, ranks)
    if not counters.step:
        raise RunFailed(f"stopped by {reason} before the first step was done; nothing was trained")
    keeper.save_now(counters)
    run.journal.end("interrupted", steps_done=counters.step, reason=reason)
    raise _interrupted(inputs, reason, counters, run.directory, command)


def _interrupted(
    inputs: Inputs, reason: str | None, counters: Counters, directory: RunDirectory, command: list[str]
) -> Interrupted:
    how = finish.continue_command(command, inputs.deepspeed.batch, directory.path)
    return Interrupted(
        f"stopped by {reason} after step {counters.step} of {inputs.experiment.run.steps}, with a checkpoint; "
        f"to continue: {how}"
    )


def _join(ranks: Ranks, timeout_s: float) -> None:
    try:
        start_process_group(ranks, timedelta(seconds=timeout_s + COLLECTIVE_MARGIN_S))
    except (dist.DistError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        if "EADDRINUSE" in reason:
            port = os.environ["MASTER_PORT"]
            reason = f"port {port} is in use, by another run perhaps; fix: deepspeed --master_port {int(port) + 1} ..."
        raise RunFailed(f"rank {ranks.rank} of {ranks.world_size} could not start: {reason}", own=True) from error


def _announce(inputs: Inputs, console: ConsoleProgress) -> None:
    """Everything that is known before the engine is built, which may take a while."""
    warnings = [*inputs.deepspeed.warnings, *opening.data_warnings(inputs)]
    for line in [*opening.describe(inputs), *(f"warning: {warning}" for warning in warnings)]:
        console.note(line)


def _finish(
    inputs: Inputs,
    ranks: Ranks,
    engine: WindowEngine,
    watchdog: Watchdog,
    run: Run,
    started: float,
    command: list[str],
) -> None:
    """Held-out loss, the saved model, a sample, and what to try next."""
    data, journal, directory, steps = inputs.data, run.journal, run.directory, inputs.experiment.run.steps
    stage = itertools.count(1)

    def progress() -> None:
        watchdog.at(steps, next(stage), "finish")

    progress()
    held_out = finish.held_out_loss(engine, data.held_out, data.tokenizer.pad_token, ranks.rank, progress)
    state = engine.full_state_dict()
    progress()
    if state is None:
        return
    finish.save_model(inputs.model, state, data.tokenizer, directory.model)
    progress()
    figures = finish.Figures(journal.losses, held_out, journal.tokens / max(journal.seconds, 1e-9))
    journal.end("finished", steps_done=steps, **figures.record())
    sequence_length = inputs.experiment.data.sequence_length
    for line in [
        *figures.lines(),
        *finish.sample_lines(directory.model, data.held_out, data.tokenizer, sequence_length),
        f"model           {directory.model}",
        f"total           {time.perf_counter() - started:.0f} s since this process began",
        f"try next        {finish.next_command(command, engine.batch)}",
    ]:
        journal.note(line)
