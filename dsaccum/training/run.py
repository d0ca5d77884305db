"""A run, from inputs that have been checked to a saved model: join the ranks, train, save, report."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import time
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from dsaccum.config.errors import ConfigError
from dsaccum.data import WindowStream
from dsaccum.engine.process import Ranks, seed_draws, start_process_group
from dsaccum.engine.refusal import refusal
from dsaccum.engine.window_engine import WindowEngine
from dsaccum.training import finish, opening
from dsaccum.training.console import ConsoleProgress
from dsaccum.training.control import ControlExchange
from dsaccum.training.failure import failures_named, is_communication
from dsaccum.training.inputs import Inputs
from dsaccum.training.journal import Journal
from dsaccum.training.loop import TrainingLoop
from dsaccum.training.outcome import ExitCode, RunFailed
from dsaccum.training.preflight import Preflight
from dsaccum.training.replica_check import ReplicaCheck
from dsaccum.training.run_directory import RunDirectory, create_output_directory
from dsaccum.training.stop_request import StopRequest
from dsaccum.training.watchdog import Watchdog

COLLECTIVE_MARGIN_S = 30.0
"""Collectives give up this much later than the watchdog, which knows better whom to name."""


def execute(
    inputs: Inputs, ranks: Ranks, *, command: list[str], started: float, preflight: Preflight | None = None
) -> ExitCode:
    """Join the other ranks, train, save, and report.

    Args:
        inputs: what was read.
        ranks: this process's place.
        command: the flags, for the record.
        started: ``time.perf_counter()`` when the process began.
        preflight: asked before the engine is built.

    Raises:
        NotEquivalent: the preflight found accumulation wrong.
        ConfigError: DeepSpeed or the file system refuses what was given.
        RunFailed: anything else that ends a run.
    """
    settings = inputs.experiment.run
    _join(ranks, settings.timeout_s)
    stop = StopRequest().listen()
    watchdog = Watchdog(ranks, settings.timeout_s, stop).start()
    journal: Journal | None = None
    try:
        with failures_named(ranks, watchdog):
            console = _announce(inputs, ranks)
            checked = None if preflight is None else preflight(inputs, ranks, watchdog, console.note)
            _stop_if_asked(stop, ranks)
            engine = _build_engine(inputs)
            journal, directory = _open_journal(inputs, ranks, engine, console, command, checked)
            watchdog.on_end = stop.on_end = partial(journal.fail, speaks=True)
            seed_draws(settings.seed, ranks)
            loop = _build_loop(inputs, ranks, engine, watchdog, stop, journal)
            steps = loop.run(settings.steps, settings.max_skipped)
            _finish(inputs, ranks, engine, watchdog, journal, directory, steps, started, command)
    except RunFailed as failure:
        if journal is not None:
            journal.fail(str(failure), speaks=failure.own)
        raise
    watchdog.stop()
    dist.destroy_process_group()
    if steps < settings.steps:
        asked_by = stop.reason or "another rank's stop request"
        raise RunFailed(
            f"stopped by {asked_by} after step {steps} of {settings.steps}; the model is in {directory.model}"
        )
    return ExitCode.DONE


def _stop_if_asked(stop: StopRequest, ranks: Ranks) -> None:
    """On all ranks, if one of them was asked to before there was anything to save."""
    reasons: list[str | None] = [None] * ranks.world_size
    dist.all_gather_object(reasons, stop.reason)
    reason = next((reason for reason in reasons if reason), None)
    if reason is not None:
        raise RunFailed(f"stopped by {reason} before the first step; nothing was trained")


def _join(ranks: Ranks, timeout_s: float) -> None:
    try:
        start_process_group(ranks, timedelta(seconds=timeout_s + COLLECTIVE_MARGIN_S))
    except (dist.DistError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        if "EADDRINUSE" in reason:
            port = os.environ["MASTER_PORT"]
            reason = f"port {port} is in use, by another run perhaps; fix: deepspeed --master_port {int(port) + 1} ..."
        raise RunFailed(f"rank {ranks.rank} of {ranks.world_size} could not start: {reason}", own=True) from error


def _build_engine(inputs: Inputs) -> WindowEngine:
    deepspeed = inputs.deepspeed
    # Some of DeepSpeed's optimizers print their memory use past all loggers.
    quiet = contextlib.nullcontext() if inputs.arguments.verbose else contextlib.redirect_stdout(io.StringIO())
    try:
        with quiet:
            return WindowEngine(inputs.model, deepspeed.config, deepspeed.batch, inputs.loss)
    except Exception as error:
        if is_communication(error):
            raise
        source = inputs.arguments.experiment
        raise refusal(error, inputs.model, config=deepspeed.source, experiment=source) from error


def _announce(inputs: Inputs, ranks: Ranks) -> ConsoleProgress:
    """Everything that is known before the engine is built, which may take a while."""
    console = ConsoleProgress(inputs.experiment.run.steps, is_first=ranks.is_first)
    warnings = [*inputs.deepspeed.warnings, *opening.data_warnings(inputs)]
    for line in [*opening.describe(inputs), *(f"warning: {warning}" for warning in warnings)]:
        console.note(line)
    return console


def _open_journal(
    inputs: Inputs,
    ranks: Ranks,
    engine: WindowEngine,
    console: ConsoleProgress,
    command: list[str],
    checked: dict[str, Any] | None,
) -> tuple[Journal, RunDirectory]:
    directory = _agree_on_directory(inputs, ranks)
    for line in [*engine.remedies, f"run             {inputs.experiment.name} -> {directory.path}"]:
        console.note(line)
    record = opening.run_record(inputs, ranks, command, checked)
    return Journal(directory, record, console, engine.write_events, is_first=ranks.is_first), directory


def _agree_on_directory(inputs: Inputs, ranks: Ranks) -> RunDirectory:
    """Rank 0 makes it; the others learn its name, or that it could not be made."""
    answer: list[RunDirectory | ConfigError | None] = [None]
    if ranks.is_first:
        try:
            answer = [create_output_directory(inputs.arguments.output_directory, inputs.experiment.name)]
        except ConfigError as error:
            answer = [error]
    dist.broadcast_object_list(answer)
    if isinstance(answer[0], RunDirectory):
        return answer[0]
    assert isinstance(answer[0], ConfigError)
    raise answer[0]


def _build_loop(
    inputs: Inputs, ranks: Ranks, engine: WindowEngine, watchdog: Watchdog, stop: StopRequest, journal: Journal
) -> TrainingLoop:
    return TrainingLoop(
        engine=engine,
        stream=WindowStream(
            inputs.data.samples, inputs.order, inputs.deepspeed.batch, ranks.rank, inputs.data.tokenizer.pad_token
        ),
        exchange=ControlExchange(ranks.rank, inputs.deepspeed.batch.accumulation_steps, engine.device),
        watchdog=watchdog,
        stop=stop,
        record=journal.step,
        note=journal.note,
        replicas=ReplicaCheck(engine.engine, inputs.experiment.run.replica_check_every, ranks.world_size),
    )


def _finish(
    inputs: Inputs,
    ranks: Ranks,
    engine: WindowEngine,
    watchdog: Watchdog,
    journal: Journal,
    directory: RunDirectory,
    steps: int,
    started: float,
    command: list[str],
) -> None:
    """Held-out loss, the saved model, a sample, and what to try next."""
    data = inputs.data
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
    complete = steps == inputs.experiment.run.steps
    figures = finish.Figures(journal.losses, held_out, journal.tokens / max(journal.seconds, 1e-9))
    journal.end("finished" if complete else "interrupted", steps_done=steps, **figures.record())
    sequence_length = inputs.experiment.data.sequence_length
    for line in [
        *figures.lines(),
        *finish.sample_lines(directory.model, data.held_out, data.tokenizer, sequence_length),
        f"model           {directory.model}",
        f"total           {time.perf_counter() - started:.0f} s since this process began",
        *([f"try next        {finish.next_command(command, engine.batch)}"] if complete else []),
    ]:
        journal.note(line)
