"""What the ranks are asked to do: build the subject of a case, run its loop under observation, measure it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsaccum.engine.leftovers import forget_earlier_engines
from dsaccum.engine.process import seed_draws
from dsaccum.engine.refusal import refusal
from dsaccum.engine.window_engine import WindowEngine
from dsaccum.loss import build_loss, model_inputs
from dsaccum.model import build_model
from dsaccum.training.checkpoints.loading import config_to_load, prepare, take_over
from dsaccum.verification.cases.case import Case
from dsaccum.verification.cases.dropout import remove_dropout
from dsaccum.verification.cases.windows import case_stream
from dsaccum.verification.fp32_products import full_products, products_as, rounds
from dsaccum.verification.measures.communication import Traffic, measure_traffic
from dsaccum.verification.measures.memory import MemoryPeak, measure_peak
from dsaccum.verification.ranks.interface import RankContext
from dsaccum.verification.subject.capture import captured, describe_start, random_state
from dsaccum.verification.subject.faults import Fault, fault_of
from dsaccum.verification.subject.loops import Subject, Windows, loop_of


@dataclass(frozen=True)
class Ran:
    """What is left to say when the last window has been sent.

    Attributes:
        losses: of each window, as the loop would log them.
        remedies: that were applied, one line each.
        traffic: of one more window, without capture.
        draws: relative difference of one micro-batch's loss between two forwards; 0 where nothing is drawn.
        random_states: from which this rank's dropout masks would be drawn, before the first window and after the last
            one; empty where the model has no dropout.
        rounding_of_products: relative difference that the user's settings for fp32 products (TF32, say) make to the
            loss of one micro-batch; they are computed in full while the case runs.
    """

    losses: list[float | None]
    remedies: list[str]
    traffic: Traffic
    draws: float
    random_states: tuple[int, ...] = ()
    rounding_of_products: float = 0.0


def run_case(context: RankContext, case: Case, /) -> Ran:
    """Run the case's windows under capture, then one more for the traffic alone."""
    with subject_of(context, case) as subject:
        loop = loop_of(case.loop)
        context.send(describe_start(subject))
        random_states = [random_state(subject.engine.device)]
        with captured(subject, _windows(context, case), context.send) as windows:
            losses = loop(subject, windows)
        random_states.append(random_state(subject.engine.device))
        again = _windows(context, case.with_windows(case.windows[:1]))
        one = again.window(case.counters.step)[0]
        traffic = measure_traffic(subject, lambda: loop(subject, again))
        return Ran(
            losses,
            subject.window_engine.remedies,
            traffic,
            _draws(subject, one),
            tuple(random_states) if subject.drops else (),
            _rounding_of_products(subject, one),
        )


def measure_memory_of(context: RankContext, case: Case, /) -> MemoryPeak:
    """The peak of one window of the case, after a first one that made the optimizer's states."""
    with subject_of(context, case) as subject:
        loop, windows = loop_of(case.loop), _windows(context, case.with_windows(case.windows[:1]))
        return measure_peak(subject, case, lambda: loop(subject, windows))


@contextmanager
def subject_of(context: RankContext, case: Case, *, dropout: bool = False) -> Iterator[Subject]:
    """The case's engine, new on this rank.

    Args:
        context: of the rank.
        case: what is run.
        dropout: whether the model keeps its own; a verification has none.
    """
    fault = _mistake(case)
    case = fault.alter(case)
    torch.manual_seed(case.experiment.run.seed)
    context.at(0, 0, "building the model")
    model = build_model(
        case.experiment.model,
        vocabulary_size=case.vocabulary.size,
        sequence_length=case.experiment.data.sequence_length,
        seed=case.experiment.run.seed,
        end_token=case.vocabulary.end_token,
        pad_token=case.vocabulary.pad_token,
        source=case.source,
    )
    model = fault.alter_model(fault_of(case.fault).request_model(model))
    drops = not dropout and bool(remove_dropout(model))
    loss = build_loss(case.experiment.loss.factory, source=case.source)
    context.at(0, 0, "building the engine")
    forget_earlier_engines()
    if case.resumed is not None:
        prepare(case.resumed.checkpoint, context.ranks)
    engine = _build_engine(model, _to_load(case), loss)
    seed_draws(case.experiment.run.seed, context.ranks)
    if case.resumed is not None:
        context.at(0, 0, "taking over the checkpoint")
        with contextlib.redirect_stdout(io.StringIO()):
            take_over(engine.engine, case.resumed.checkpoint, context.ranks, case.experiment.run.seed)
    with full_products() as products:
        subject = Subject(engine, context.ranks, context, drops, products, case.counters)
        with fault.planted(subject, case):
            yield subject
    engine.engine.destroy()  # not after a failure: it could wait for ranks that have ended, and the pool ends them all


@torch.no_grad()
def _draws(subject: Subject, micro_batch: dict[str, Tensor]) -> float:
    """How far two forwards of the same micro-batch at the same parameters are apart."""
    return _apart(_loss_sum(subject, micro_batch), _loss_sum(subject, micro_batch))


@torch.no_grad()
def _rounding_of_products(subject: Subject, micro_batch: dict[str, Tensor]) -> float:
    """How far the user's own settings for fp32 products move the loss of a micro-batch."""
    if not rounds(subject.products):
        return 0.0
    full = _loss_sum(subject, micro_batch)
    with products_as(subject.products):
        return _apart(full, _loss_sum(subject, micro_batch))


def _loss_sum(subject: Subject, micro_batch: dict[str, Tensor]) -> float:
    engine = subject.window_engine
    on_device = {name: field.to(engine.device) for name, field in micro_batch.items()}
    return float(engine.loss.sum(engine.engine(**model_inputs(on_device)), on_device))


def _apart(first: float, second: float) -> float:
    return abs(first - second) / abs(first) if first else 0.0


def _windows(context: RankContext, case: Case) -> Windows:
    """What the loop is given: this rank's part of the case's windows, or what a planted fault makes of it."""
    return _mistake(case).feed(case_stream(case, context.ranks.rank), case, context.ranks.rank)


def _mistake(case: Case) -> Fault:
    """The fault that is put in; one that does nothing where only what it asks for is wanted."""
    return fault_of(case.fault if case.planted else None)


def _to_load(case: Case) -> Case:
    """With a config that a checkpoint can be taken over with, where there is one."""
    if case.resumed is None:
        return case
    return replace(case, config=config_to_load(case.config, case.resumed.checkpoint, case.batch.world_size))


def _build_engine(model: torch.nn.Module, case: Case, loss: Any) -> WindowEngine:
    try:
        # Some of DeepSpeed's optimizers print their memory use past all loggers.
        with contextlib.redirect_stdout(io.StringIO()):
            return WindowEngine(model, case.config, case.batch, loss, remedies=case.remedies)
    except (AssertionError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise refusal(error, model, config="--deepspeed", experiment=case.source) from error
