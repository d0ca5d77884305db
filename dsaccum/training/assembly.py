"""The parts of a run, each made from what was read: engine, records, checkpoints, loop."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch.distributed as dist

from dsaccum.config.errors import ConfigError
from dsaccum.data import WindowStream
from dsaccum.engine.process import Ranks, seed_draws
from dsaccum.engine.refusal import refusal
from dsaccum.engine.window_engine import WindowEngine
from dsaccum.training import finish, opening
from dsaccum.training.checkpoints.keeping import CheckpointKeeper
from dsaccum.training.checkpoints.loading import config_to_load, prepare, take_over
from dsaccum.training.checkpoints.manifest import Counters, Split, StreamOrigin
from dsaccum.training.checkpoints.random_state import random_state, restore_random_state
from dsaccum.training.checkpoints.saving import CheckpointWriter
from dsaccum.training.checkpoints.shelf import Checkpoint, Shelf
from dsaccum.training.console import ConsoleProgress
from dsaccum.training.continuing import Continuation
from dsaccum.training.control import ControlExchange
from dsaccum.training.failure import is_communication
from dsaccum.training.gathering import Gathering
from dsaccum.training.inputs import Inputs
from dsaccum.training.journal import Journal
from dsaccum.training.loop import TrainingLoop
from dsaccum.training.micro_batch import AutomaticMicroBatch
from dsaccum.training.replica_check import ReplicaCheck
from dsaccum.training.run_directory import RunDirectory, create_output_directory
from dsaccum.training.stop_request import StopRequest
from dsaccum.training.watchdog import Watchdog


@dataclass(frozen=True)
class Run:
    """Where a run stands and where it is written down."""

    directory: RunDirectory
    journal: Journal
    origin: StreamOrigin
    checkpoint: Checkpoint | None
    lock: BinaryIO | None
    """Rank 0 holds it to the end of the process."""

    @property
    def counters(self) -> Counters:
        """Where it stands when this process begins with it."""
        return self.checkpoint.manifest.counters if self.checkpoint is not None else Counters()


def build_engine(inputs: Inputs, ranks: Ranks, continuation: Continuation | None) -> WindowEngine:
    """The engine, in the state from which the run goes on."""
    deepspeed, checkpoint = inputs.deepspeed, continuation.checkpoint if continuation is not None else None
    config = deepspeed.config
    if checkpoint is not None:
        prepare(checkpoint, ranks)
        config = config_to_load(config, checkpoint, ranks.world_size)
    # Some of DeepSpeed's optimizers print their memory use past all loggers.
    quiet = contextlib.nullcontext() if inputs.arguments.verbose else contextlib.redirect_stdout(io.StringIO())
    try:
        with quiet:
            engine = WindowEngine(inputs.model, config, deepspeed.batch, inputs.loss, recover=deepspeed.automatic)
    except Exception as error:
        if is_communication(error):
            raise
        source = inputs.arguments.experiment
        raise refusal(error, inputs.model, config=deepspeed.source, experiment=source) from error
    seed = inputs.experiment.run.seed
    if checkpoint is None:
        seed_draws(seed, ranks)
    else:
        with quiet:
            take_over(engine.engine, checkpoint, ranks, seed)
    return engine


def open_run(
    inputs: Inputs,
    ranks: Ranks,
    engine: WindowEngine,
    console: ConsoleProgress,
    record: dict[str, Any],
    continuation: Continuation | None,
) -> Run:
    """Its directory and records; what was written past the checkpoint goes. A collective.

    Raises:
        ConfigError: the file system refuses, on all ranks alike.
    """
    if continuation is None:
        directory, lock = _agree_on_directory(inputs, ranks)
        checkpoint, origin, kept = None, StreamOrigin(), 0
    else:
        directory, lock = continuation.directory, continuation.lock
        checkpoint, origin, kept = continuation.checkpoint, continuation.origin, continuation.metrics_bytes
        record = {**record, "continued": continuation.continued, "split_anew": continuation.split_anew}
    for line in [*engine.remedies, f"run             {inputs.experiment.name} -> {directory.path}"]:
        console.note(line)
    first, before = ranks.is_first, continuation.metrics if continuation is not None else ()
    journal = Journal(
        directory, record, console, engine.write_events, is_first=first, before=before, metrics_bytes=kept
    )
    return Run(directory, journal, origin, checkpoint, lock)


def build_keeper(inputs: Inputs, ranks: Ranks, engine: WindowEngine, watchdog: Watchdog, run: Run) -> CheckpointKeeper:
    """Saves as ``run.checkpoint_every`` and its like say."""
    settings = inputs.experiment.run
    writer = CheckpointWriter(
        engine.engine,
        Shelf(run.directory.checkpoints),
        lambda: Split.of(engine.batch),
        run.origin,
        settings.keep_checkpoints,
        opening.installed_versions(),
        ranks.rank,
        run.journal.make_metrics_durable,
        watchdog.moved,
        Gathering(ranks, watchdog, dist.distributed_c10d._get_default_store()).wait,
    )
    return CheckpointKeeper(
        writer,
        settings.checkpoint_every,
        settings.on_checkpoint_error,
        run.journal.note,
        lambda step: watchdog.at(step, 0, "checkpoint"),
        run.checkpoint,
    )


def _agree_on_directory(inputs: Inputs, ranks: Ranks) -> tuple[RunDirectory, BinaryIO | None]:
    """Rank 0 makes it; the others learn its name, or that it could not be made."""
    answer: list[RunDirectory | ConfigError | None] = [None]
    lock = None
    if ranks.is_first:
        try:
            directory = create_output_directory(inputs.arguments.output_directory, inputs.experiment.name)
            lock = directory.lock()
            answer = [directory]
        except ConfigError as error:
            answer = [error]
    dist.broadcast_object_list(answer)
    if isinstance(answer[0], RunDirectory):
        return answer[0], lock
    assert isinstance(answer[0], ConfigError)
    raise answer[0]


def build_stream(inputs: Inputs, ranks: Ranks, run: Run) -> WindowStream:
    """This rank's windows, from where the run begins."""
    data, order = inputs.data, inputs.window_order(run.origin)
    return WindowStream(data.samples, order, inputs.deepspeed.batch, ranks.rank, data.tokenizer.pad_token)


def build_loop(
    inputs: Inputs,
    ranks: Ranks,
    engine: WindowEngine,
    watchdog: Watchdog,
    stop: StopRequest,
    run: Run,
    keeper: CheckpointKeeper,
    stream: WindowStream,
    automatic: AutomaticMicroBatch | None,
) -> TrainingLoop:
    """With everything that it tells and asks on the way."""
    journal = run.journal
    return TrainingLoop(
        engine=engine,
        stream=stream,
        exchange=ControlExchange(ranks.rank, engine.device),
        watchdog=watchdog,
        stop=stop,
        record=journal.step,
        note=journal.note,
        replicas=ReplicaCheck(engine.engine, inputs.experiment.run.replica_check_every, ranks.world_size),
        evaluate=_evaluation(inputs, ranks, engine, watchdog, journal),
        at_boundary=keeper.at_boundary,
        after_void_window=automatic.after_void_window if automatic is not None else None,
    )


def _evaluation(
    inputs: Inputs, ranks: Ranks, engine: WindowEngine, watchdog: Watchdog, journal: Journal
) -> Callable[[int], float | None]:
    """Every ``run.eval_every`` steps the held-out loss; nothing that training draws is drawn by it."""
    every, data = inputs.experiment.run.eval_every, inputs.data

    def evaluate(step: int) -> float | None:
        if not every or step % every:
            return None
        watchdog.at(step, engine.batch.accumulation_steps, "evaluation")
        state = random_state()
        loss = finish.held_out_loss(engine, data.held_out, data.tokenizer.pad_token, ranks.rank, watchdog.moved)
        restore_random_state(state)
        journal.note(f"step {step}: held-out loss {loss:.4f}")
        return loss

    return evaluate
