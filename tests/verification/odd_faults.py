"""Mistakes that are no fault of the table's, for ``--inject odd_faults.py:<name>``: none may get another's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dsaccum.verification.cases.case import Case
from dsaccum.verification.subject.faults import Fault
from dsaccum.verification.subject.faults.fault import replaced
from dsaccum.verification.subject.loops import Subject

Hook = Callable[[torch.optim.Optimizer], None]


class AtStep(Fault):
    """Something that is done right before, or right after, each step of the optimizer itself."""

    def __init__(self, identifier: str, do: Callable[[Subject, torch.optim.Optimizer], None], *, after: bool) -> None:
        super().__init__(id=identifier, summary=identifier.replace("-", " "))
        object.__setattr__(self, "do", do)
        object.__setattr__(self, "after", after)

    @contextmanager
    def planted(self, subject: Subject, case: Case) -> Iterator[None]:
        base = getattr(subject.engine.optimizer, "optimizer", subject.engine.optimizer)
        register = base.register_step_post_hook if self.after else base.register_step_pre_hook
        handle = register(lambda optimizer, *_: self.do(subject, optimizer))
        try:
            yield
        finally:
            handle.remove()


def shrinks_one_gradient() -> Fault:
    """Between clipping and the step."""

    def do(subject: Subject, optimizer: Any) -> None:
        optimizer.param_groups[0]["params"][5].grad.mul_(0.9)

    return AtStep("shrinks-one-gradient", do, after=False)


def writes_to_unused() -> Fault:
    """A parameter that no gradient reaches, moved by hand."""

    @torch.no_grad()
    def do(subject: Subject, optimizer: Any) -> None:
        dict(subject.engine.module.named_parameters())["unused"].add_(0.01)

    return AtStep("writes-to-unused", do, after=True)


@torch.no_grad()
def _write_to_frozen(subject: Subject) -> None:
    subject.engine.module.embedding.weight.add_(0.01)


def writes_to_the_frozen_in_the_step() -> Fault:
    """As an optimizer does that was given all parameters."""
    return AtStep("writes-to-the-frozen", lambda subject, optimizer: _write_to_frozen(subject), after=True)


class AtBackward(Fault):
    """Something that is done after the backward of each micro-step but a window's last."""

    def __init__(self, identifier: str, do: Callable[[Subject], None]) -> None:
        super().__init__(id=identifier, summary=identifier.replace("-", " "))
        object.__setattr__(self, "do", do)

    @contextmanager
    def planted(self, subject: Subject, case: Case) -> Iterator[None]:
        engine = subject.engine
        backward = engine.backward

        def then_do(*arguments: Any, **keywords: Any) -> Any:
            result = backward(*arguments, **keywords)
            if not engine.is_gradient_accumulation_boundary():
                self.do(subject)
            return result

        with replaced(engine, "backward", then_do):
            yield


def adds_small_noise() -> Fault:
    """As large as what a sum in bf16 loses, and of no such pattern."""

    def do(subject: Subject) -> None:
        for parameter in subject.engine.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1 + 1e-3 * torch.randn_like(parameter.grad))

    return AtBackward("adds-small-noise", do)


def third_rate() -> Fault:
    """The rate is right until the third update."""
    steps = []

    def do(subject: Subject, optimizer: Any) -> None:
        steps.append(1)
        if len(steps) == 3:
            optimizer.param_groups[0]["lr"] *= 1.5

    return AtStep("third-rate", do, after=False)
