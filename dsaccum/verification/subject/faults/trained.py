"""The set of trained parameters is not what was asked: one that is frozen changes, one without gradient decays, two
that are tied are trained apart.

The first two need a model that has such a parameter, so both sides are asked for one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dsaccum.verification.subject.faults.fault import Fault, Unfit, replaced
from dsaccum.verification.subject.faults.parameters import middle_parameter, tied_parameters

if TYPE_CHECKING:
    from dsaccum.verification.cases.case import Case
    from dsaccum.verification.subject.loops import Subject

FROZEN = "frozen_by_the_fault"
UNUSED = "unused_by_any_forward"
CHANGE = 0.01


class FrozenParameterChanged(Fault):
    """A parameter is frozen, and a script writes to it after each optimizer step on every rank."""

    def request_model(self, model: nn.Module) -> nn.Module:  # noqa: D102
        name, parameter = middle_parameter(model)
        parameter.requires_grad_(False)
        setattr(model, FROZEN, name)
        return model

    @contextmanager
    def planted(self, subject: Subject, case: Case) -> Iterator[None]:  # noqa: D102
        engine = subject.engine
        step = engine.step
        parameter = engine.module.get_parameter(getattr(engine.module, FROZEN))

        def then_write(*arguments: Any, **keywords: Any) -> None:
            at_boundary = engine.is_gradient_accumulation_boundary()
            step(*arguments, **keywords)
            if at_boundary:
                with torch.no_grad():
                    parameter.add_(CHANGE)  # at ZeRO 3 empty, or a copy that the rank keeps whole ...
                    if hasattr(parameter, "ds_tensor"):
                        parameter.ds_tensor.add_(CHANGE)  # ... of which this part is the rank's own

        with replaced(engine, "step", then_write):
            yield


class AbsentGradientDecayed(Fault):
    """A parameter takes part in no forward: DeepSpeed makes zeros of its missing gradient, and weight decay acts."""

    def request_model(self, model: nn.Module) -> nn.Module:  # noqa: D102
        model.register_parameter(UNUSED, nn.Parameter(torch.ones(8)))
        return model


class TiedWeightsSplit(Fault):
    """Tied parameters are copied where the second one is used, so that each is trained by itself."""

    def unfit_model(self, model: nn.Module) -> Unfit | None:  # noqa: D102
        return None if tied_parameters(model) else Unfit("the model ties no weights")

    def alter_model(self, model: nn.Module) -> nn.Module:  # noqa: D102
        for name in tied_parameters(model):
            path, _, attribute = name.rpartition(".")
            module = model.get_submodule(path)
            setattr(module, attribute, nn.Parameter(getattr(module, attribute).detach().clone()))
        return model


def _decays(case: Case) -> Unfit | None:
    parameters = case.config.get("optimizer", {}).get("params", {})
    return None if parameters.get("weight_decay") else Unfit("nothing decays", '"weight_decay" in optimizer.params')


TRAINED_FAULTS: tuple[Fault, ...] = (
    FrozenParameterChanged(
        id="frozen-parameter-changed",
        summary="a parameter without requires_grad is written to, as by an average or a constraint over all parameters",
    ),
    TiedWeightsSplit(
        id="tied-weights-split",
        summary="tied weights are copied, as by loading or wrapping, and then trained as two",
    ),
    AbsentGradientDecayed(
        id="absent-gradient-decayed",
        summary="a parameter that no forward uses gets zeros for its gradient from DeepSpeed, and weight decay acts",
        needs=(_decays,),
    ),
)
