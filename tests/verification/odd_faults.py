"""Mistakes that are no fault of the table's, for ``--inject odd_faults.py:<name>``: none may get another's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dsaccum.verification.cases.case import Case
from dsaccum.verification.subject.faults import Fault
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


def third_rate() -> Fault:
    """The rate is right until the third update."""
    steps = []

    def do(subject: Subject, optimizer: Any) -> None:
        steps.append(1)
        if len(steps) == 3:
            optimizer.param_groups[0]["lr"] *= 1.5

    return AtStep("third-rate", do, after=False)
