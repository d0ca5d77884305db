"""Faults past the gradient: learning rate, schedule, and Adam's count of steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from dsaccum.config.optimizer import is_number
from dsaccum.instruments.adapters import adapter_for
from dsaccum.verification.subject.faults.fault import Fault, Unfit, replaced, several_micro_steps

if TYPE_CHECKING:
    from dsaccum.verification.cases.case import Case
    from dsaccum.verification.subject.loops import Subject

RATIO = 1.5
"""No whole number: doubled, the rates of a linear warm-up are also those of a schedule that runs twice as fast."""


class SchedulePerMicroStep(Fault):
    """The script steps the scheduler at every micro-step but the last, at which the engine does."""

    @contextmanager
    def planted(self, subject: Subject, case: Case) -> Iterator[None]:  # noqa: D102
        engine = subject.engine
        step = engine.step

        def then_advance(*arguments: Any, **keywords: Any) -> None:
            at_boundary = engine.is_gradient_accumulation_boundary()
            step(*arguments, **keywords)
            if not at_boundary:
                engine.lr_scheduler.step()

        with replaced(engine, "step", then_advance):
            yield


class ScheduleOffset(Fault):
    """The schedule is one step ahead from the start."""

    @contextmanager
    def planted(self, subject: Subject, case: Case) -> Iterator[None]:  # noqa: D102
        subject.engine.lr_scheduler.step()
        yield


class RateMismatch(Fault):
    """All rates are multiplied on their way to DeepSpeed."""

    def alter(self, case: Case) -> Case:  # noqa: D102
        sections: dict[str, Any] = {
            name: {**case.config[name], "params": _other_rates(case.config[name].get("params", {}))}
            for name in ("optimizer", "scheduler")
            if name in case.config
        }
        return replace(case, config={**case.config, **sections})


class OptimizerCountOffset(Fault):
    """One optimizer step with gradients of zero before the first window, as DeepSpeed's own bf16 wrapper makes."""

    @contextmanager
    def planted(self, subject: Subject, case: Case) -> Iterator[None]:  # noqa: D102
        _make_empty_step(subject.engine)
        yield


def _make_empty_step(engine: Any) -> None:
    adapter = adapter_for(engine)
    masters = {id(place.master): (place.group, place.master) for place in adapter.places()}.values()
    held = [group["params"] for group in adapter.base.param_groups]
    for group in adapter.base.param_groups:  # at ZeRO 3 they are empty between steps
        group["params"] = [master for its_group, master in masters if its_group is group]
    for _, master in masters:
        master.grad = torch.zeros_like(master)
    adapter.base.step()
    for _, master in masters:
        master.grad = None
    for group, parameters in zip(adapter.base.param_groups, held, strict=True):
        group["params"] = parameters


def _other_rates(parameters: dict[str, Any]) -> dict[str, Any]:
    return {name: RATIO * value if _is_rate(name) and is_number(value) else value for name, value in parameters.items()}


def _is_rate(name: str) -> bool:
    return name == "lr" or name.endswith("_lr")


def _has_schedule(case: Case) -> Unfit | None:
    return None if case.config.get("scheduler") else Unfit("the config has no scheduler", 'a "scheduler" in the JSON')


def _states_a_rate(case: Case) -> Unfit | None:
    sections = (case.config.get(name) or {} for name in ("optimizer", "scheduler"))
    rates = [name for section in sections for name in section.get("params", {}) if _is_rate(name)]
    return None if rates else Unfit("the config states no learning rate", '"lr" in optimizer.params')


def _counts_steps(case: Case) -> Unfit | None:
    name = case.config["optimizer"]["type"]
    return None if "adam" in name.lower() else Unfit(f"{name} has no bias correction that counts steps")


OPTIMIZER_FAULTS: tuple[Fault, ...] = (
    SchedulePerMicroStep(
        id="schedule-per-micro-step",
        summary="scheduler.step() is called at every micro-step, not once in a window",
        needs=(_has_schedule, several_micro_steps),
    ),
    ScheduleOffset(
        id="schedule-offset",
        summary="the schedule is one step ahead: advanced once before training, or resumed at the wrong step",
        needs=(_has_schedule,),
    ),
    RateMismatch(
        id="rate-mismatch",
        summary="the learning rate is multiplied on its way (here by 1.5), as by a scaling rule that nobody stated",
        needs=(_states_a_rate,),
    ),
    OptimizerCountOffset(
        id="optimizer-count-offset",
        summary="the optimizer makes an empty step at start, so that Adam's bias correction is one count ahead",
        needs=(_counts_steps,),
    ),
)
