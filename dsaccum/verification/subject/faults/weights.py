"""Micro-batches that weigh another share than they should, by a factor on the loss that ``engine.backward`` is given.

A factor reaches the gradient in the same way at every ZeRO stage and in every loop: backward is linear in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dsaccum.verification.subject.faults.fault import (
    Fault,
    replaced,
    several_micro_batches,
    several_micro_steps,
    several_ranks,
)

if TYPE_CHECKING:
    from dsaccum.verification.cases.case import Case
    from dsaccum.verification.subject.loops import Subject


@contextmanager
def losses_multiplied(subject: Subject, factor: Callable[[int], float]) -> Iterator[None]:
    """Inside, each loss is multiplied by ``factor(micro_step)`` (from 1, within the window) before backward."""
    engine, steps = subject.engine, subject.accumulation_steps
    backward = engine.backward

    def multiplied(loss: Tensor, *arguments: Any, **keywords: Any) -> Any:
        return backward(loss * factor(engine.micro_steps % steps + 1), *arguments, **keywords)

    with replaced(engine, "backward", multiplied):
        yield


@dataclass(frozen=True, kw_only=True, eq=False)
class Weighed(Fault):
    """Micro-batches weigh ``factor`` times what they should.

    Attributes:
        factor: of a case, a rank and a micro-step from 1.
    """

    factor: Callable[[Case, int, int], float]

    @contextmanager
    def planted(self, subject: Subject, case: Case) -> Iterator[None]:  # noqa: D102
        with losses_multiplied(subject, lambda micro_step: self.factor(case, subject.ranks.rank, micro_step)):
            yield


class NonFinite(Fault):
    """NaN once, in the first window: later ones show what it left behind."""

    @contextmanager
    def planted(self, subject: Subject, case: Case) -> Iterator[None]:  # noqa: D102
        engine, first = subject.engine, subject.engine.micro_steps

        def factor(micro_step: int) -> float:
            in_first_window = engine.micro_steps - first < subject.accumulation_steps
            return math.nan if in_first_window and _is_the_one(case, subject.ranks.rank, micro_step) else 1.0

        with losses_multiplied(subject, factor):
            yield


def _is_the_one(case: Case, rank: int, micro_step: int) -> bool:
    """Micro-step 2 of rank 0: neither the first nor, from N = 3 on, the last."""
    return rank == 0 and micro_step == min(2, case.batch.accumulation_steps)


WEIGHT_FAULTS: tuple[Fault, ...] = (
    Weighed(
        id="loss-not-scaled",
        summary="nobody divides by N: the script leaves it to the engine, the engine is told that the script does it",
        needs=(several_micro_steps,),
        factor=lambda case, rank, micro_step: case.batch.accumulation_steps,
    ),
    Weighed(
        id="loss-scaled-twice",
        summary="the script divides the loss by N, and engine.backward does so again",
        needs=(several_micro_steps,),
        factor=lambda case, rank, micro_step: 1 / case.batch.accumulation_steps,
    ),
    Weighed(
        id="only-last-micro-batch",
        summary="gradients are cleared at every micro-step, so that only the last one's are left",
        needs=(several_micro_steps,),
        factor=lambda case, rank, micro_step: float(micro_step == case.batch.accumulation_steps),
    ),
    Weighed(
        id="micro-batch-dropped",
        summary="one micro-batch is skipped on one rank, as after an out-of-memory error that was caught",
        needs=(several_micro_batches,),
        factor=lambda case, rank, micro_step: float(not _is_the_one(case, rank, micro_step)),
    ),
    Weighed(
        id="ranks-summed",
        summary="gradients are summed over ranks and never divided by W",
        needs=(several_ranks,),
        factor=lambda case, rank, micro_step: case.batch.world_size,
    ),
    Weighed(
        id="ranks-averaged-twice",
        summary="the script divides the loss by W, and DeepSpeed averages over the ranks",
        needs=(several_ranks,),
        factor=lambda case, rank, micro_step: 1 / case.batch.world_size,
    ),
    NonFinite(id="non-finite-gradient", summary="the loss of one micro-batch is NaN on one rank"),
)
