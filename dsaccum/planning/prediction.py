"""Peak memory of a window: what the micro-step has alive beside what the engine holds, event by event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np

from dsaccum.planning.engines.engine import Engine
from dsaccum.planning.engines.ledger import CATEGORIES, Category
from dsaccum.planning.trace import IntArray, Kind, MicroStep

PHASES = ("forward", "backward", "step")
_amounts = itemgetter(*CATEGORIES)


@dataclass(frozen=True)
class Moment:
    """What is held at one moment, in bytes by category: the engine's four, activations, logits, data."""

    by_category: Mapping[str, int]

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.by_category.values())


@dataclass(frozen=True)
class Peaks:
    """The highest moment of each phase of a window, on one rank."""

    by_phase: Mapping[str, Moment]

    @property
    def phase(self) -> str:
        """In which the peak lies."""
        return max(self.by_phase, key=lambda phase: self.by_phase[phase].total)

    @property
    def peak(self) -> Moment:
        """The highest of all."""
        return self.by_phase[self.phase]


@dataclass(frozen=True)
class _Curve:
    """What the engine holds at each event of a micro-step, by category, and at the end of its backward pass."""

    held: IntArray
    finish: Mapping[Category, int]


def distinct_steps(accumulation_steps: int, *, overlaps: bool) -> int:
    """Micro-steps of a window that are led through: those between the first and the last one are all alike.

    They need no more than the last one, unless that one reduces its gradients while it makes them.
    """
    return min(accumulation_steps, 3 if overlaps else 2)


@dataclass(frozen=True)
class EngineWindow:
    """An engine's bytes through a window: they depend on N, but not on B.

    Attributes:
        curves: of the micro-steps that differ in what the engine holds, the last one being the boundary.
        step: at the optimizer step's highest moment.
    """

    curves: Sequence[_Curve] = field(repr=False)
    step: Mapping[Category, int]

    @classmethod
    def of(cls, engine: Engine, micro_step: MicroStep, accumulation_steps: int) -> EngineWindow:
        """Lead an engine through a window of so many micro-steps."""
        different = distinct_steps(accumulation_steps, overlaps=engine.layout.overlaps)
        curves = [_lead(engine, micro_step, boundary=index == different - 1) for index in range(different)]
        engine.ledger.mark()
        engine.step()
        return cls(curves, dict(engine.ledger.highest))

    def peaks(self, micro_step: MicroStep, data: int) -> Peaks:
        """The peaks of a window.

        Args:
            micro_step: at the wanted B, with the events that the engine was led through.
            data: bytes of the micro-batches that lie on the device.
        """
        found: dict[str, list[Moment]] = {"step": [_moment(self.step, 0, 0, data)]}
        for curve in self.curves:
            total = curve.held.sum(axis=0) + micro_step.alive
            for phase, within in (("forward", ~micro_step.backward), ("backward", micro_step.backward)):
                at = int(np.argmax(np.where(within, total, -1)))
                held = dict(zip(CATEGORIES, curve.held[:, at].tolist(), strict=True))
                alive, logits = int(micro_step.alive[at]), int(micro_step.logits[at])
                found.setdefault(phase, []).append(_moment(held, alive - logits, logits, data))
            found["backward"].append(_moment(curve.finish, 0, 0, data))
        return Peaks({phase: max(found[phase], key=lambda moment: moment.total) for phase in PHASES})


def _moment(held: Mapping[Category, int], activations: int, logits: int, data: int) -> Moment:
    engine: dict[str, int] = {category: held[category] for category in CATEGORIES}
    return Moment({**engine, "activations": activations, "logits": logits, "data": data})


def _lead(engine: Engine, micro_step: MicroStep, *, boundary: bool) -> _Curve:
    """Tell the engine of each event; what it holds stays the same until the next event that it is told of."""
    engine.begin(micro_step.visits, boundary=boundary)
    told = np.flatnonzero(micro_step.kind != Kind.OPERATION)
    subjects = zip(told.tolist(), micro_step.kind[told].tolist(), micro_step.subject[told].tolist(), strict=True)
    levels, lengths, since = [], [], 0
    for event, kind, subject in subjects:
        before = _amounts(engine.ledger.held)
        kept = _tell(engine, kind, subject)
        levels += [before, _amounts(engine.ledger.highest)]
        lengths += [event - since, 1]
        engine.ledger.take("gradients", kept)
        since = event + 1
    levels.append(_amounts(engine.ledger.held))
    lengths.append(len(micro_step.kind) - since)
    engine.ledger.mark()
    engine.finish()
    return _Curve(np.repeat(np.array(levels).T, lengths, axis=1), dict(engine.ledger.highest))


def _tell(engine: Engine, kind: int, subject: int) -> int:
    engine.ledger.mark()
    if kind == Kind.GRADIENT:
        return engine.gradient(subject)
    if kind == Kind.ENTER:
        engine.enter(subject)
    else:
        engine.leave(subject)
    return 0
