"""Several faults at once: what one of them hides of another, a diagnosis has to admit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from torch import nn

from dsaccum.verification.subject.faults.fault import Fault, Unfit

if TYPE_CHECKING:
    from dsaccum.verification.cases.case import Case
    from dsaccum.verification.subject.loops import Subject, Windows


@dataclass(frozen=True, kw_only=True, eq=False)
class Together(Fault):
    """Each of them is put in as it is by itself, one around the other.

    Attributes:
        faults: at least two.
    """

    faults: tuple[Fault, ...]

    @classmethod
    def of(cls, *faults: Fault) -> Together:
        """These, with what each of them needs."""
        return cls(
            id="+".join(fault.id for fault in faults),
            summary="; ".join(fault.summary for fault in faults),
            needs=tuple(need for fault in faults for need in fault.needs),
            faults=faults,
        )

    def unfit_model(self, model: nn.Module) -> Unfit | None:  # noqa: D102
        return next((unfit for fault in self.faults if (unfit := fault.unfit_model(model))), None)

    def request(self, case: Case) -> Case:  # noqa: D102
        return reduce(lambda asked, fault: fault.request(asked), self.faults, case)

    def request_model(self, model: nn.Module) -> nn.Module:  # noqa: D102
        return reduce(lambda asked, fault: fault.request_model(asked), self.faults, model)

    def alter(self, case: Case) -> Case:  # noqa: D102
        return reduce(lambda altered, fault: fault.alter(altered), self.faults, case)

    def alter_model(self, model: nn.Module) -> nn.Module:  # noqa: D102
        return reduce(lambda altered, fault: fault.alter_model(altered), self.faults, model)

    def feed(self, windows: Windows, case: Case, rank: int) -> Windows:  # noqa: D102
        return reduce(lambda fed, fault: fault.feed(fed, case, rank), self.faults, windows)

    @contextmanager
    def planted(self, subject: Subject, case: Case) -> Iterator[None]:  # noqa: D102
        with ExitStack() as stack:
            for fault in self.faults:
                stack.enter_context(fault.planted(subject, case))
            yield
