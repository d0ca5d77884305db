"""What goes wrong between ranks: gradients not exchanged or exchanged too often, replicas that are none."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dsaccum.instruments.adapters import adapter_for
from dsaccum.verification.cases.dropout import remove_dropout
from dsaccum.verification.subject.faults.fault import (
    Fault,
    Unfit,
    not_partitioned,
    replaced,
    several_micro_steps,
    several_ranks,
)
from dsaccum.verification.subject.faults.parameters import middle_parameter

if TYPE_CHECKING:
    from dsaccum.verification.cases.case import Case
    from dsaccum.verification.subject.loops import Subject

APART = 0.01
"""Also seen in bf16, whose neighbours of 1 are 0.004 and 0.008 away."""


class RanksNotReduced(Fault):
    """The engine's own switch, turned off: what is left when somebody means to reduce by hand, and does not."""

    @contextmanager
    def planted(self, subject: Subject, case: Case) -> Iterator[None]:  # noqa: D102
        with replaced(subject.engine, "enable_backward_allreduce", False):
            yield


class ReducedEveryMicroStep(Fault):
    """The all-reduce of the boundary at the other micro-steps, too: mean + new gradients still add up rightly."""

    @contextmanager
    def planted(self, subject: Subject, case: Case) -> Iterator[None]:  # noqa: D102
        engine = subject.engine
        backward = engine.backward

        def then_reduce(*arguments: Any, **keywords: Any) -> Any:
            result = backward(*arguments, **keywords)
            if not engine.is_gradient_accumulation_boundary():
                engine.buffered_allreduce_fallback()
            return result

        with replaced(engine, "backward", then_reduce):
            yield


class RanksStartApart(Fault):
    """All ranks but the first begin with weights that are 1 % larger, after DeepSpeed's broadcast."""

    @contextmanager
    def planted(self, subject: Subject, case: Case) -> Iterator[None]:  # noqa: D102
        if not subject.ranks.is_first:
            with torch.no_grad():
                for weights in _own_weights(subject.engine):
                    weights.mul_(1 + APART)
        yield


class RanksDriftApart(Fault):
    """All ranks but the first change one parameter after each step."""

    @contextmanager
    def planted(self, subject: Subject, case: Case) -> Iterator[None]:  # noqa: D102
        engine = subject.engine
        step = engine.step
        _, parameter = middle_parameter(engine.module)

        def then_drift(*arguments: Any, **keywords: Any) -> None:
            at_boundary = engine.is_gradient_accumulation_boundary()
            step(*arguments, **keywords)
            if at_boundary and not subject.ranks.is_first:
                with torch.no_grad():
                    parameter.add_(APART)

        with replaced(engine, "step", then_drift):
            yield


class SameSeedOnEveryRank(Fault):
    """Every rank is seeded alike, and draws the same dropout masks."""

    def unfit_model(self, model: nn.Module) -> Unfit | None:  # noqa: D102
        return None if remove_dropout(copy.deepcopy(model)) else Unfit("the model has no dropout")

    @contextmanager
    def planted(self, subject: Subject, case: Case) -> Iterator[None]:  # noqa: D102
        torch.manual_seed(case.experiment.run.seed)
        yield


def _own_weights(engine: Any) -> list[torch.Tensor]:
    """Each tensor once that this rank alone would have to keep equal: parameters, at ZeRO 0 their masters, too."""
    weights: list[torch.Tensor] = list(engine.module.parameters())
    if engine.zero_optimization_stage() == 0:
        weights += [place.master for place in adapter_for(engine).places()]
    return list({id(tensor): tensor for tensor in weights}.values())


def _reduction_can_be_left_out(case: Case) -> Unfit | None:
    reason = f"at ZeRO {case.zero_stage} the optimizer cannot step without its reduction"
    return Unfit(reason) if case.zero_stage else None


def _reduces_once(case: Case) -> Unfit | None:
    if case.zero_stage >= 2:
        return Unfit(f"ZeRO {case.zero_stage} reduces at every micro-step by design")
    reason = "ZeRO 1 has no reduction that a script could call at other micro-steps"
    return Unfit(reason) if case.zero_stage else None


RANK_FAULTS: tuple[Fault, ...] = (
    RanksNotReduced(
        id="ranks-not-reduced",
        summary="the all-reduce is turned off to be made by hand, and nobody makes it",
        needs=(several_ranks, _reduction_can_be_left_out),
    ),
    ReducedEveryMicroStep(
        id="reduced-every-micro-step",
        summary="gradients are reduced at every micro-step, as by data parallelism that was not told to wait",
        needs=(several_micro_steps, _reduces_once),
    ),
    SameSeedOnEveryRank(
        id="same-seed-on-every-rank",
        summary="every rank sets the same seed, so that all of them draw the same dropout masks",
        needs=(several_ranks,),
    ),
    RanksStartApart(
        id="ranks-start-apart",
        summary="ranks begin with different weights: loaded or changed after the engine had made them equal",
        needs=(several_ranks, not_partitioned),
    ),
    RanksDriftApart(
        id="ranks-drift-apart",
        summary="a weight is changed on some ranks only, as by a constraint or an average that is applied to one copy",
        needs=(several_ranks, not_partitioned),
    ),
)
