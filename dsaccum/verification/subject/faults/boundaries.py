"""Windows that begin or end at the wrong place: steps inside them, a shifted boundary, a buffer that is not cleared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from dsaccum.batch import STEPS_KEY, TOTAL_KEY
from dsaccum.verification.subject.faults.fault import Fault, several_micro_steps, several_windows

if TYPE_CHECKING:
    from dsaccum.verification.cases.case import Case
    from dsaccum.verification.subject.loops import Subject


class StepInsideWindow(Fault):
    """DeepSpeed gets N = 1, the loop goes on making N micro-steps."""

    def alter(self, case: Case) -> Case:  # noqa: D102
        total = case.batch.world_size * case.batch.micro_batch
        return replace(case, config={**case.config, STEPS_KEY: 1, TOTAL_KEY: total})


class BoundaryShifted(Fault):
    """The engine's count of micro-steps is one ahead of the loop's."""

    @contextmanager
    def planted(self, subject: Subject, case: Case) -> Iterator[None]:  # noqa: D102
        subject.engine.micro_steps += 1
        try:
            yield
        finally:
            subject.engine.micro_steps -= 1


class StaleGradients(Fault):
    """Every window adds to what the last one left: hooks on the parameters keep what ``param.grad`` would hold."""

    @contextmanager
    def planted(self, subject: Subject, case: Case) -> Iterator[None]:  # noqa: D102
        engine, steps = subject.engine, subject.accumulation_steps
        buffer: dict[str, Tensor] = {}

        def add_left_over(name: str, gradient: Tensor) -> Tensor:
            if engine.micro_steps % steps == 0 and name in buffer:
                gradient = gradient + buffer.pop(name)
            buffer[name] = buffer[name] + gradient if name in buffer else gradient.clone()
            return gradient

        with ExitStack() as hooks:
            for name, parameter in engine.module.named_parameters():
                if parameter.requires_grad:
                    hooks.callback(parameter.register_hook(partial(add_left_over, name)).remove)
            yield


BOUNDARY_FAULTS: tuple[Fault, ...] = (
    StepInsideWindow(
        id="step-inside-window",
        summary="gradient_accumulation_steps never reaches DeepSpeed (a misspelt key), which steps at every micro-step",
        needs=(several_micro_steps,),
    ),
    BoundaryShifted(
        id="boundary-shifted",
        summary="engine and loop disagree where a window ends, as after a checkpoint that was saved inside one",
        needs=(several_micro_steps,),
    ),
    StaleGradients(
        id="stale-gradients",
        summary="gradients are not cleared after the step, so that the next window adds to them",
        needs=(several_windows,),
    ),
)
