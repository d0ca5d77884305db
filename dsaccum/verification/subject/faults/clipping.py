"""Clipping at the wrong place, or to another limit. Clipped is multiplied by min(1, limit / (norm + 1e-6))."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad_norm_

from dsaccum.instruments.gradients import read_gradients
from dsaccum.verification.subject.faults.fault import Fault, Unfit, replaced, several_micro_steps, several_ranks

if TYPE_CHECKING:
    from dsaccum.verification.cases.case import Case
    from dsaccum.verification.subject.loops import Subject


class ClippedEveryMicroStep(Fault):
    """What a rank has added up is clipped after each backward but the last: the boundary's clipping is DeepSpeed's."""

    @contextmanager
    def planted(self, subject: Subject, case: Case) -> Iterator[None]:  # noqa: D102
        engine = subject.engine
        backward = engine.backward

        def then_clip(*arguments: Any, **keywords: Any) -> Any:
            result = backward(*arguments, **keywords)
            if not engine.is_gradient_accumulation_boundary():
                clip_grad_norm_(engine.module.parameters(), case.gradient_clipping)
            return result

        with replaced(engine, "backward", then_clip):
            yield


class ClippedBeforeReduction(Fault):
    """At the boundary each rank clips its own sum, and only then are ranks averaged."""

    @contextmanager
    def planted(self, subject: Subject, case: Case) -> Iterator[None]:  # noqa: D102
        engine = subject.engine
        reduce = engine.allreduce_gradients

        def clip_first(*arguments: Any, **keywords: Any) -> Any:
            if engine.is_gradient_accumulation_boundary():
                clip_grad_norm_(engine.module.parameters(), case.gradient_clipping)
            return reduce(*arguments, **keywords)

        with replaced(engine, "allreduce_gradients", clip_first):
            yield


class ClippingMismatch(Fault):
    """The limit is half of what was asked for, or of the first window's norm where that is less: so that it acts."""

    @contextmanager
    def planted(self, subject: Subject, case: Case) -> Iterator[None]:  # noqa: D102
        engine = subject.engine
        take_model_step = engine._take_model_step
        limit = 0.0

        def with_other_limit(*arguments: Any, **keywords: Any) -> Any:
            nonlocal limit
            limit = limit or 0.5 * min(case.gradient_clipping or math.inf, _reduced_norm(engine))
            with _limited(engine, limit):
                return take_model_step(*arguments, **keywords)

        with replaced(engine, "_take_model_step", with_other_limit):
            yield


@contextmanager
def _limited(engine: Any, limit: float) -> Iterator[None]:
    """DeepSpeed reads the limit from the engine in fp32 at ZeRO 0, else from the optimizer's wrapper."""
    with ExitStack() as replacements:
        replacements.enter_context(replaced(engine, "gradient_clipping", lambda: limit))
        if hasattr(engine.optimizer, "clip_grad"):
            replacements.enter_context(replaced(engine.optimizer, "clip_grad", limit))
        yield


def _reduced_norm(engine: Any) -> float:
    gradients = [gradient.float() for gradient in read_gradients(engine).values() if gradient is not None]
    return float(torch.nn.utils.get_total_norm(gradients)) / float(getattr(engine.optimizer, "loss_scale", None) or 1)


def _clips(case: Case) -> Unfit | None:
    return None if case.gradient_clipping else Unfit("the config clips nothing", '"gradient_clipping" in the JSON')


def _whole_sums(case: Case) -> Unfit | None:
    """Each rank's own sum lies in ``param.grad`` until the boundary, where a script can reach it."""
    zero = case.config.get("zero_optimization", {})
    in_place = case.accumulation_dtype == case.precision or "autocast" in case.precision
    if case.zero_stage == 0 or (case.zero_stage == 1 and in_place and not zero.get("overlap_comm")):
        return None
    return Unfit("this ZeRO stage keeps no whole sum of a rank's gradients that could be clipped")


CLIPPING_FAULTS: tuple[Fault, ...] = (
    ClippedEveryMicroStep(
        id="clipped-every-micro-step",
        summary="the script clips after each backward, DeepSpeed at the boundary",
        needs=(_clips, several_micro_steps, _whole_sums),
    ),
    ClippedBeforeReduction(
        id="clipped-before-reduction",
        summary="each rank clips its own gradient before ranks are averaged",
        needs=(_clips, several_ranks, _whole_sums),
    ),
    ClippingMismatch(
        id="clipping-mismatch",
        summary="another clipping limit acts than the JSON asks for",
    ),
)
