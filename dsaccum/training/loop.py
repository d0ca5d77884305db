"""The training loop. One pass is one window: N micro-steps on each of W ranks, and one optimizer step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor

from dsaccum.engine.window_engine import MicroBatch, WindowEngine, WindowOutcome
from dsaccum.loss import window_count
from dsaccum.training.checkpoints.manifest import Counters
from dsaccum.training.checkpoints.random_state import random_state, restore_random_state
from dsaccum.training.control import Agreement, ControlExchange, WindowReport
from dsaccum.training.metrics import StepMetrics
from dsaccum.training.outcome import RunFailed
from dsaccum.training.replica_check import ReplicaCheck
from dsaccum.training.stop_request import StopRequest

Note = Callable[[str], None]


class Windows(Protocol):
    """This rank's micro-batches, window by window; windows count from 0."""

    def window(self, index: int) -> list[dict[str, Tensor]]:
        """The N micro-batches of a window."""

    def samples_in(self, index: int) -> int:
        """How many of their rows hold a sample."""


class Place(Protocol):
    """Where a rank tells that it stands, so that one that hangs can be named."""

    def at(self, step: int, micro_step: int, phase: str) -> None:
        """``step`` from 1, ``micro_step`` from 1 or 0 before the first; ``phase``: data, exchange, forward, ..."""


@dataclass(frozen=True)
class Finished:
    """A window that has been run and whose loss the ranks have not yet agreed on."""

    step: int
    samples: int
    targets: int
    seconds: float
    outcome: WindowOutcome
    held_out_loss: float | None


class TrainingLoop:
    """Runs windows until the steps are done or somebody asks to stop.

    Args:
        engine: one window in, one optimizer step out.
        stream: this rank's micro-batches of each window.
        exchange: the control all-reduce.
        watchdog: told at each phase where this rank stands.
        stop: whether this rank was asked to stop.
        record: what to do with each step's metrics; called on every rank, one window late.
        note: shows a person one line.
        replicas: checks now and then that the ranks' parameters are the same; None for never.
        evaluate: the held-out loss after a step, or None where it is not looked at. A collective.
        at_boundary: called on all ranks when a window is done and recorded, and nothing of the next one is begun.
        after_void_window: told the step and what this rank's memory lacked, if it did, when a step was discarded;
            returns the windows in smaller micro-batches, to run this one again, or None. A collective.
    """

    def __init__(
        self,
        engine: WindowEngine,
        stream: Windows,
        exchange: ControlExchange,
        watchdog: Place,
        stop: StopRequest,
        record: Callable[[StepMetrics], None],
        note: Note,
        replicas: ReplicaCheck | None = None,
        evaluate: Callable[[int], float | None] = lambda _: None,
        at_boundary: Callable[[Counters], None] = lambda _: None,
        after_void_window: Callable[[int, str | None], Windows | None] | None = None,
    ) -> None:
        self._engine, self._stream, self._exchange = engine, stream, exchange
        self._watchdog, self._stop, self._record, self._note = watchdog, stop, record, note
        self._replicas = replicas
        self._evaluate, self._at_boundary, self._after_void_window = evaluate, at_boundary, after_void_window
        self._counters = Counters()

    def run(self, steps: int, max_skipped: int, start: Counters | None = None) -> Counters:
        """Train; returns where the run stands then, before ``steps`` when it was asked to stop.

        Args:
            steps: of the whole run.
            max_skipped: so many skipped steps in a row end it.
            start: where it stands; None for its beginning.

        Raises:
            RunFailed: ``max_skipped`` steps in a row had a gradient that was not finite, or the ranks' parameters
                came to differ.
        """
        finished: Finished | None = None
        self._counters = start or Counters()
        clock = time.perf_counter()
        for step in range(self._counters.step + 1, steps + 1):
            self._watchdog.at(step, 0, "data")
            micro_batches = self._stream.window(step - 1)
            targets = window_count(self._engine.loss, micro_batches)
            rows = self._stream.samples_in(step - 1)

            self._watchdog.at(step, 0, "exchange")
            window = self._agree(finished, targets=targets, samples=rows)
            self._stop_if_hopeless(max_skipped)
            if finished is not None:
                self._at_boundary(self._counters)
            if window.stop:
                return self._counters

            outcome = self._run_window(step, micro_batches, window.targets)
            held_out_loss = self._evaluate(step)
            clock, started = time.perf_counter(), clock
            finished = Finished(step, window.samples, window.targets, clock - started, outcome, held_out_loss)
        self._watchdog.at(steps, 0, "exchange")
        self._agree(finished, targets=0, samples=0)
        self._stop_if_hopeless(max_skipped)
        if self._replicas is not None and self._replicas.pending:  # of the last step: nobody has told the others yet
            self._agree(None, targets=0, samples=0)
        return self._counters

    def _run_window(self, step: int, micro_batches: Sequence[MicroBatch], targets: int) -> WindowOutcome:
        """In smaller micro-batches again and again, as long as some rank has no memory for it."""
        progress = partial(self._watchdog.at, step)
        if self._after_void_window is None:
            return self._engine.run_window(micro_batches, targets, progress)
        generators = random_state()
        while True:
            outcome = self._engine.run_window(micro_batches, targets, progress)
            if outcome.applied and outcome.out_of_memory is not None:
                raise RunFailed(
                    f"step {step} was applied although this rank had no memory for it ({outcome.out_of_memory[:200]}); "
                    "a smaller --micro-batch avoids it",
                    own=True,
                )
            smaller = None if outcome.applied else self._after_void_window(step, outcome.out_of_memory)
            if smaller is None:
                return outcome
            restore_random_state(generators)
            self._stream, micro_batches = smaller, smaller.window(step - 1)

    def _agree(self, finished: Finished | None, *, targets: int, samples: int) -> Agreement:
        """Exchange counts of the coming window and the loss of the finished one, which is recorded at once."""
        report = WindowReport() if finished is None else _report(finished.outcome)
        check = self._replicas
        if check is not None:
            check.look(finished.step if finished is not None else 0)
        agreement = self._exchange(
            targets=targets,
            samples=samples,
            finished=report,
            stop=self._stop.made,
            digest=check.digest if check else 0,
            apart=check.apart if check else False,
        )
        if finished is not None:
            self._account(finished, agreement)
        if check is not None:
            if agreement.apart:
                raise RunFailed(check.describe())
            check.compare(agreement.digest_sum)
        return agreement

    def _account(self, finished: Finished, agreement: Agreement) -> None:
        outcome, before = finished.outcome, self._counters
        self._counters = Counters(
            step=finished.step,
            samples=before.samples + finished.samples,
            tokens=before.tokens + finished.targets,
            skipped_in_a_row=0 if outcome.applied else before.skipped_in_a_row + 1,
        )
        if finished.step == 1 and self._engine.decayed_without_gradient:
            self._note(_describe_decay(self._engine.decayed_without_gradient))
        if not outcome.applied:
            in_a_row = self._counters.skipped_in_a_row
            self._note(f"step {finished.step} skipped on all ranks: {_where(agreement)} ({in_a_row} in a row)")
        elif agreement.non_finite_ranks:
            self._note(f"step {finished.step} applied, its gradient is finite, and yet {_where(agreement)}")
        self._record(
            StepMetrics(
                step=finished.step,
                samples=self._counters.samples,
                tokens=self._counters.tokens,
                loss=_window_loss(finished, agreement),
                learning_rate=outcome.learning_rate,
                gradient_norm=outcome.gradient_norm,
                seconds=finished.seconds,
                applied=outcome.applied,
                effective_batch=self._engine.batch.total,
                held_out_loss=finished.held_out_loss,
            )
        )

    def _stop_if_hopeless(self, max_skipped: int) -> None:
        if self._counters.skipped_in_a_row >= max_skipped:
            raise RunFailed(
                f"{self._counters.skipped_in_a_row} optimizer steps in a row had a gradient that is not finite "
                "(run.max_skipped); a lower learning rate or a look at the data may help"
            )


def _report(outcome: WindowOutcome) -> WindowReport:
    losses = outcome.micro_losses.tolist()
    return WindowReport(
        loss_sum=math.fsum(loss for loss in losses if math.isfinite(loss)),
        non_finite=[index + 1 for index, loss in enumerate(losses) if not math.isfinite(loss)],
    )


def _window_loss(finished: Finished, agreement: Agreement) -> float | None:
    """The mean over all target tokens of the window on all ranks; None where it has no finite value."""
    known = finished.outcome.applied and not agreement.non_finite_ranks and finished.targets
    return agreement.loss_sum / finished.targets if known else None


def _where(agreement: Agreement) -> str:
    if agreement.culprit is not None:
        rank, micro_step = agreement.culprit
        return f"the loss of rank {rank}, micro-step {micro_step}, is not finite"
    if agreement.non_finite_ranks:
        return f"the losses of {agreement.non_finite_ranks} ranks are not finite"
    return "every loss is finite, the gradient is not"


def _describe_decay(names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"warning: no gradient reached {shown}, yet weight decay changes them; "
        "freeze them (requires_grad = False), or set weight_decay to 0"
    )
