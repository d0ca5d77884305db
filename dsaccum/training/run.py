"""A run from its two files to its directory: everything is read and checked first, then trained, then saved."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch import nn

from dsaccum.config.deepspeed import DeepSpeedSettings, load_deepspeed_config
from dsaccum.config.errors import ConfigError
from dsaccum.config.experiment import Experiment
from dsaccum.config.loading import load_experiment
from dsaccum.data import Data, WindowOrder, WindowStream, load_data
from dsaccum.engine.process import Ranks, start_process_group
from dsaccum.engine.schema import installed_schema
from dsaccum.engine.window_engine import WindowEngine
from dsaccum.loss import SummedLoss, build_loss, model_adds_loss
from dsaccum.model import build_model
from dsaccum.training import finish, opening
from dsaccum.training.arguments import TrainArguments
from dsaccum.training.console import ConsoleProgress
from dsaccum.training.control import ControlExchange
from dsaccum.training.failure import failures_named
from dsaccum.training.journal import Journal
from dsaccum.training.loop import TrainingLoop
from dsaccum.training.outcome import ExitCode, RunFailed
from dsaccum.training.run_directory import RunDirectory, check_output_directory, create_output_directory
from dsaccum.training.stop_request import StopRequest
from dsaccum.training.watchdog import Watchdog

COLLECTIVE_MARGIN_S = 30.0
"""Collectives give up this much later than the watchdog, which knows better whom to name."""


@dataclass(frozen=True)
class Inputs:
    """All that the user gave, read and checked."""

    arguments: TrainArguments
    experiment: Experiment
    deepspeed: DeepSpeedSettings
    data: Data
    order: WindowOrder
    model: nn.Module
    parameters: dict[str, int]
    """Counted before DeepSpeed has it: at ZeRO 3 a partitioned parameter says that it is empty."""
    loss: SummedLoss


def read_inputs(arguments: TrainArguments, ranks: Ranks) -> Inputs:
    """Read both files, the data and the model. Changes nothing on disk.

    Raises:
        ConfigError: whatever the user can mend.
    """
    experiment = load_experiment(arguments.experiment, arguments.overrides)
    deepspeed = load_deepspeed_config(
        arguments.deepspeed,
        schema=installed_schema(),
        experiment=experiment,
        world_size=ranks.world_size,
        accumulation_steps=arguments.accumulation_steps,
        micro_batch=arguments.micro_batch,
    )
    if ranks.is_first:
        check_output_directory(arguments.output_directory)
    source = arguments.experiment
    loss = build_loss(experiment.loss.factory, source=source)
    data = load_data(experiment.data, source)
    order = WindowOrder(
        len(data.samples), deepspeed.batch.total, experiment.data.last_window, experiment.data.seed, source
    )
    model = build_model(
        experiment.model,
        vocabulary_size=len(data.tokenizer),
        sequence_length=experiment.data.sequence_length,
        seed=experiment.run.seed,
        end_token=data.tokenizer.end_token,
        pad_token=data.tokenizer.pad_token,
        source=source,
    )
    if experiment.loss.factory is None and model_adds_loss(model, len(data.tokenizer), experiment.data.sequence_length):
        raise ConfigError(
            "the model's forward adds a loss of its own to the cross entropy (a router's auxiliary loss?)",
            source=source,
            key="loss.factory",
            allowed="FILE.py:function that states the whole loss",
            fix="switch it off in model.config (output_router_logits: false), or write loss.factory",
        )
    return Inputs(arguments, experiment, deepspeed, data, order, model, opening.parameter_count(model), loss)


def execute(inputs: Inputs, ranks: Ranks, *, command: list[str], started: float) -> ExitCode:
    """Join the other ranks, train, save, and report.

    Args:
        inputs: what was read.
        ranks: this process's place.
        command: the flags, for the record.
        started: ``time.perf_counter()`` when the process began.

    Raises:
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
            engine = _build_engine(inputs)
            journal, directory = _open_journal(inputs, ranks, engine, command)
            watchdog.on_end = partial(journal.fail, speaks=True)
            loop = _build_loop(inputs, ranks, engine, watchdog, stop, journal)
            steps = loop.run(settings.steps, settings.max_skipped)
            _finish(inputs, ranks, engine, watchdog, journal, directory, steps, started)
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
    try:
        return WindowEngine(inputs.model, deepspeed.config, deepspeed.batch, inputs.loss)
    except (AssertionError, ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"DeepSpeed refuses this config ({reason})", source=deepspeed.source) from error


def _open_journal(
    inputs: Inputs, ranks: Ranks, engine: WindowEngine, command: list[str]
) -> tuple[Journal, RunDirectory]:
    directory = _agree_on_directory(inputs, ranks)
    console = ConsoleProgress(inputs.experiment.run.steps, is_first=ranks.is_first)
    versions = opening.installed_versions()
    record = opening.run_record(inputs, ranks, command, versions)
    for line in opening.describe(inputs, str(directory.path), versions):
        console.note(line)
    warnings = [*inputs.deepspeed.warnings, *opening.data_warnings(inputs)]
    for line in [*(f"warning: {warning}" for warning in warnings), *engine.remedies]:
        console.note(line)
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
) -> None:
    """Held-out loss, the saved model, a sample, and what to try next."""
    data = inputs.data
    progress = partial(watchdog.at, steps, 0, "finish")
    held_out = finish.held_out_loss(engine, data.held_out, data.tokenizer.pad_token, ranks.rank, progress)
    state = engine.full_state_dict()
    progress()
    if state is None:
        return
    finish.save_model(inputs.model, state, data.tokenizer, directory.model)
    progress()
    complete = steps == inputs.experiment.run.steps
    figures = finish.Figures(journal.losses, held_out, journal.tokens / max(journal.seconds, 1e-9))
    journal.end("finished" if complete else "interrupted", **figures.record())
    sequence_length = inputs.experiment.data.sequence_length
    prompt = finish.choose_prompt(data.held_out, sequence_length)
    text = finish.sample_text(directory.model, prompt, data.tokenizer, sequence_length)
    for line in [
        *figures.lines(),
        *finish.quote(data.tokenizer.decode(prompt), text),
        f"model           {directory.model}",
        f"total           {time.perf_counter() - started:.0f} s since this process began",
        f"try next        {finish.next_command(inputs)}",
    ]:
        journal.note(line)
