"""Faults of the forward and its graph: a gradient lost, noise, graphs that are kept, a loss that is no sum."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dsaccum.verification.subject.faults.fault import Fault, Unfit, replaced, several_micro_batches, several_micro_steps
from dsaccum.verification.subject.faults.parameters import middle_parameter
from dsaccum.verification.subject.loops import DSACCUM

if TYPE_CHECKING:
    from dsaccum.verification.cases.case import Case
    from dsaccum.verification.subject.loops import Subject

BATCH_STATISTICS_LOSS = f"{Path(__file__).with_name('batch_statistics_loss.py')}:build"
NOISE = 0.1
"""Relative, on the embeddings."""


class ParameterGradientLost(Fault):
    """One parameter's gradient is zero, as behind a ``detach`` that stands too early."""

    @contextmanager
    def planted(self, subject: Subject, case: Case) -> Iterator[None]:  # noqa: D102
        _, parameter = middle_parameter(subject.engine.module)
        hook = parameter.register_hook(torch.zeros_like)
        try:
            yield
        finally:
            hook.remove()


class RandomnessActive(Fault):
    """Noise on the embeddings, drawn anew in each forward: another split of the batch draws other numbers."""

    @contextmanager
    def planted(self, subject: Subject, case: Case) -> Iterator[None]:  # noqa: D102
        modules = subject.engine.module.modules()
        first = next(module for module in modules if isinstance(module, nn.Embedding | nn.Linear))
        hook = first.register_forward_hook(lambda module, inputs, output: _with_noise(output))
        try:
            yield
        finally:
            hook.remove()


class ActivationsKept(Fault):
    """Losses are kept until the window's end together with their graphs."""

    @contextmanager
    def planted(self, subject: Subject, case: Case) -> Iterator[None]:  # noqa: D102
        engine, steps = subject.engine, subject.accumulation_steps
        backward = engine.backward
        losses: list[Tensor] = []

        def keep(loss: Tensor, *arguments: Any, **keywords: Any) -> Any:
            if engine.micro_steps % steps == 0:
                losses.clear()
            losses.append(loss)
            return backward(loss, *arguments, **{**keywords, "retain_graph": True})

        with replaced(engine, "backward", keep):
            yield


class LossNotAdditive(Fault):
    """Both sides are asked for a loss in which the samples of a micro-batch meet."""

    def request(self, case: Case) -> Case:  # noqa: D102
        loss = case.experiment.loss.model_copy(update={"factory": BATCH_STATISTICS_LOSS})
        return replace(case, experiment=case.experiment.model_copy(update={"loss": loss}))


def _with_noise(output: Tensor) -> Tensor:
    return output * (1 + NOISE * torch.randn_like(output))


def _loss_is_replaceable(case: Case) -> Unfit | None:
    if case.loop != DSACCUM:
        return Unfit(f"the loop {case.loop} does not read loss.factory", "--loop dsaccum")
    own = case.experiment.loss.factory not in (None, BATCH_STATISTICS_LOSS)
    return Unfit("the experiment has a loss.factory of its own") if own else None


MODEL_FAULTS: tuple[Fault, ...] = (
    ParameterGradientLost(
        id="parameter-gradient-lost",
        summary="one parameter's gradient is lost, as behind a detach() that stands too early",
    ),
    RandomnessActive(
        id="randomness-active",
        summary="noise is drawn in each forward, so that the result depends on how the batch is split",
    ),
    ActivationsKept(
        id="activations-kept",
        summary="losses are collected with their graphs (retain_graph, no detach), so that memory grows with N",
        needs=(several_micro_steps,),
    ),
    LossNotAdditive(
        id="loss-not-additive",
        summary="the loss has a term over the whole micro-batch (balancing, contrastive), which no split can preserve",
        needs=(several_micro_batches, _loss_is_replaceable),
    ),
)
