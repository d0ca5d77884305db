"""Low precision handled wrongly: a sum that loses small terms, a loss scale on one side only.

fp16 multiplies the loss by a scale, so that small gradients survive, and divides the gradients by it before the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsaccum.verification.subject.faults.fault import Fault, Unfit, several_micro_steps
from dsaccum.verification.subject.faults.weights import losses_multiplied

if TYPE_CHECKING:
    from dsaccum.verification.cases.case import Case
    from dsaccum.verification.subject.loops import Subject


class LowPrecisionAccumulation(Fault):
    """Gradients are added up in bf16: hooks on the parameters keep the sum, and pass on what it grew by."""

    @contextmanager
    def planted(self, subject: Subject, case: Case) -> Iterator[None]:  # noqa: D102
        engine, steps = subject.engine, subject.accumulation_steps
        sums: dict[str, Tensor] = {}

        def grown(name: str, gradient: Tensor) -> Tensor:
            before = sums.get(name) if engine.micro_steps % steps else None
            after = gradient.bfloat16() if before is None else (before.float() + gradient).bfloat16()
            sums[name] = after
            return after.float() - (0 if before is None else before.float())

        with ExitStack() as hooks:
            for name, parameter in engine.module.named_parameters():
                if parameter.requires_grad:
                    hooks.callback(parameter.register_hook(partial(grown, name)).remove)
            yield


class LossScaleNotApplied(Fault):
    """Losses reach backward without the scale that gradients are divided by all the same."""

    @contextmanager
    def planted(self, subject: Subject, case: Case) -> Iterator[None]:  # noqa: D102
        with losses_multiplied(subject, lambda micro_step: 1 / _loss_scale(subject)):
            yield


class LossScaleNotRemoved(Fault):
    """The optimizer is given gradients that are multiplied by the scale."""

    @contextmanager
    def planted(self, subject: Subject, case: Case) -> Iterator[None]:  # noqa: D102
        base = getattr(subject.engine.optimizer, "optimizer", subject.engine.optimizer)

        def scale_again(*_: Any) -> None:
            with torch.no_grad():
                for parameter in (each for group in base.param_groups for each in group["params"]):
                    if parameter.grad is not None:
                        parameter.grad.mul_(_loss_scale(subject))

        hook = base.register_step_pre_hook(scale_again)
        try:
            yield
        finally:
            hook.remove()


def _loss_scale(subject: Subject) -> float:
    return float(subject.engine.optimizer.loss_scale)


def _promises_fp32(case: Case) -> Unfit | None:
    if case.accumulation_dtype != "fp32":
        return Unfit(f"the config accumulates in {case.accumulation_dtype} itself", '"grad_accum_dtype": "fp32"')
    if case.precision != "fp32":
        return Unfit(f"a {case.precision} forward rounds as much as a sum in bf16 does")
    return None


def _has_loss_scale(case: Case) -> Unfit | None:
    return None if case.precision == "fp16" else Unfit(f"{case.precision} has no loss scale; fp16 has, on a GPU")


PRECISION_FAULTS: tuple[Fault, ...] = (
    LowPrecisionAccumulation(
        id="low-precision-accumulation",
        summary="gradients are added up in bf16 where the config has fp32, so that small terms are lost",
        needs=(several_micro_steps, _promises_fp32),
    ),
    LossScaleNotApplied(
        id="loss-scale-not-applied",
        summary="fp16 gradients are divided by a loss scale that the loss was never multiplied by (on a GPU only)",
        needs=(_has_loss_scale,),
    ),
    LossScaleNotRemoved(
        id="loss-scale-not-removed",
        summary="fp16 gradients reach the optimizer still multiplied by the loss scale (on a GPU only)",
        needs=(_has_loss_scale,),
    ),
)
