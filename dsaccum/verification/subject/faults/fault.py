"""What a fault is: one mistake that people make, put in from outside: the code under test knows nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

if TYPE_CHECKING:
    from dsaccum.verification.cases.case import Case
    from dsaccum.verification.subject.loops import Subject, Windows


class Unfit(NamedTuple):
    """Why a case cannot show a fault, and the smallest change with which it could, where there is one."""

    reason: str
    fix: str | None = None


Need = Callable[["Case"], Unfit | None]
"""None where the case has what a fault needs."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Fault:
    """A mistake that can be put in. By itself this class changes nothing; each fault overrides what it needs.

    Attributes:
        id: its identifier, the same word everywhere.
        summary: what people do wrong, in one line.
        needs: what a case must have to show it.
    """

    id: str
    summary: str
    needs: tuple[Need, ...] = ()

    def inapplicable(self, case: Case, model: nn.Module | None = None) -> Unfit | None:
        """Why this case, with this model as it was built, cannot show the fault; None where it can."""
        unfit = next((unfit for need in self.needs if (unfit := need(case))), None)
        return unfit if unfit or model is None else self.unfit_model(model)

    def unfit_model(self, model: nn.Module) -> Unfit | None:
        """The same, as far as it lies in the model, of which dropout has not been removed yet."""
        return None

    def request(self, case: Case) -> Case:
        """What the user would ask for; the reference is told, too."""
        return case

    @property
    def asks_for_a_model(self) -> bool:
        """Whether ``request_model`` changes anything."""
        return type(self).request_model is not Fault.request_model

    def request_model(self, model: nn.Module) -> nn.Module:
        """The model as the user made it, changed in place or another; the reference has the same."""
        return model

    def alter(self, case: Case) -> Case:
        """The case as the mistaken script runs it; the reference is not told."""
        return case

    def alter_model(self, model: nn.Module) -> nn.Module:
        """The model that the mistaken script hands to DeepSpeed; the reference has the one that was asked for."""
        return model

    def feed(self, windows: Windows, case: Case, rank: int) -> Windows:
        """What the loop is given instead of ``windows``."""
        return windows

    def planted(self, subject: Subject, case: Case) -> AbstractContextManager[None]:
        """Inside, the live engine makes the mistake. ``case`` is the altered one."""
        return nullcontext()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, this one object's attribute is ``value``; its class stays as it is."""
    was_its_own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if was_its_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def several_micro_steps(case: Case) -> Unfit | None:
    """N > 1."""
    one = case.batch.accumulation_steps == 1
    return Unfit("a window is one micro-step (N = 1)", "--accum-steps 3") if one else None


def several_ranks(case: Case) -> Unfit | None:
    """W > 1."""
    return Unfit("there is one rank", "--ranks 2") if case.batch.world_size == 1 else None


def several_micro_batches(case: Case) -> Unfit | None:
    """N W > 1."""
    one = case.batch.accumulation_steps * case.batch.world_size == 1
    return Unfit("a window is one micro-batch (N = W = 1)", "--accum-steps 3") if one else None


def several_windows(case: Case) -> Unfit | None:
    """At least two steps."""
    return Unfit("there is one step only", "--steps 2") if len(case.windows) == 1 else None


def not_partitioned(case: Case) -> Unfit | None:
    """ZeRO 0 to 2: each rank holds every parameter."""
    return Unfit("at ZeRO 3 no two ranks hold the same parameter") if case.zero_stage == 3 else None
