"""Did a run go on from what its checkpoint holds? Compared to the bit: what was written is read, and not computed.

The run's own state is seen before the first optimizer step after the checkpoint was loaded; the other side is read from
the checkpoint's files without DeepSpeed's loader. The reference then goes on from that other side alone, so that what
the loader lost is missing in the run and not in the reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsaccum.instruments.gradients import Snapshot
from dsaccum.verification.cases.saved_state import SavedState
from dsaccum.verification.subject.capture import Start, WindowCapture

WEIGHTS, FIXED = "weights", "values"
"""What is not a state of the optimizer: what it steps, and what is not trained."""


@dataclass(frozen=True)
class RestoredCheck:
    """What differs, by name of the state (``weights``, ``exp_avg``, ``step``, ...) and of the parameter.

    Attributes:
        differing: state -> parameters of which it isn't the checkpoint's.
        lost: the states among them that are zero, or not there, where the checkpoint has other values.
        parameters: that were compared.
        states: of the optimizer that were compared.
    """

    differing: Mapping[str, list[str]]
    lost: tuple[str, ...]
    parameters: int
    states: tuple[str, ...]

    @property
    def weights(self) -> list[str]:
        """Parameters and buffers that are not the checkpoint's."""
        return [*self.differing.get(WEIGHTS, ()), *self.differing.get(FIXED, ())]

    @property
    def optimizer(self) -> dict[str, list[str]]:
        """The optimizer's states that are not."""
        return {state: names for state, names in self.differing.items() if state not in (WEIGHTS, FIXED)}


def check_restored(saved: SavedState, first: WindowCapture) -> RestoredCheck | None:
    """Compare what the run had before its first step with the checkpoint's files.

    Args:
        saved: from the files.
        first: the first window, on rank 0.

    Returns:
        None where no optimizer step shows it.
    """
    found = first.steps[0].before if first.steps else None
    if found is None:
        return None
    differing: dict[str, list[str]] = {}
    lost = []

    def look(state: str, name: str, due: Tensor, there: Tensor | None) -> None:
        if there is not None and _same(due, there):
            return
        differing.setdefault(state, []).append(name)
        if state not in lost and (there is None or not bool(there.any())) and bool(due.any()):
            lost.append(state)

    for name, due in saved.weights.items():
        look(WEIGHTS, name, due, found.masters.get(name))
        for state, value in saved.states.get(name, {}).items():
            look(state, name, value, found.states.get(name, {}).get(state))
    for name, due in saved.fixed.items():
        if name in found.parameters and name not in found.masters:
            look(FIXED, name, due, found.parameters[name])
    kept = tuple(dict.fromkeys(state for states in saved.states.values() for state in states))
    return RestoredCheck(differing, tuple(lost), len(saved.weights), kept)


def from_saved(
    saved: SavedState, starts: Sequence[Start], captures: Sequence[Sequence[WindowCapture]]
) -> tuple[list[Start], list[list[WindowCapture]]]:
    """The same with the checkpoint's state in place of the one that the run had before its first step."""
    first, *others = captures[0]
    if first.steps and first.steps[0].before is not None:
        step = replace(first.steps[0], before=_snapshot(saved, first.steps[0].before))
        first = replace(first, steps=[step, *first.steps[1:]])
    buffers = {name: saved.fixed.get(name, value) for name, value in starts[0].buffers.items()}
    return [replace(starts[0], buffers=buffers), *starts[1:]], [[first, *others], *map(list, captures[1:])]


def _snapshot(saved: SavedState, found: Snapshot) -> Snapshot:
    """The checkpoint's state as the run would show it; rates and betas are the run's own, and judged as such."""
    values = {**saved.fixed, **saved.weights}
    parameters = {name: values.get(name, value).to(value.dtype) for name, value in found.parameters.items()}
    return Snapshot(
        parameters, dict(saved.weights), {name: dict(saved.states[name]) for name in saved.weights}, found.options
    )


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.double(), other.double())
