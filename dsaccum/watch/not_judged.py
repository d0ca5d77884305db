"""Windows of which nothing can be compared, for a reason that is no mistake: each is said, and not judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dsaccum.instruments.gradients import ObservedStep
from dsaccum.watch.recompute import NotRepeatable


def refuse_step(observed: ObservedStep) -> None:
    """After inf or NaN nothing can be compared.

    Raises:
        NotRepeatable: it is so.
    """
    found = [g for g in observed.gradients.values() if g is not None and not bool(torch.isfinite(g).all())]
    if found or not observed.applied:
        skipped = "" if observed.applied else ", and the engine skipped the step"
        raise NotRepeatable(f"the gradient is not finite{skipped}; look at another window")


def refuse_micro_steps(columns: Sequence[Mapping[str, Tensor]]) -> None:
    """One is not finite, and what the optimizer got is: the script took something out of it, and nothing adds up.

    Raises:
        NotRepeatable: it is so.
    """
    for k, column in enumerate(columns, start=1):
        if not all(bool(torch.isfinite(tensor).all()) for tensor in column.values()):
            raise NotRepeatable(
                f"the gradient of micro-step {k} is not finite, and what the optimizer got is; look at another window"
            )


def refuse_steps_aside(changed: tuple[int, str] | None, inputs: Sequence[Any]) -> None:
    """The whole batch comes once more, with other parameters: a step aside, whose gradients are not accumulated.

    Args:
        changed: the first micro-step, from 1, that ran with other parameters than the window's first, and one of them.
        inputs: of each micro-step.

    Raises:
        NotRepeatable: it is so.
    """
    half = len(inputs) // 2
    if changed is None or changed[0] != half + 1 or any(not given for given in inputs):
        return
    if list(inputs[:half]) == list(inputs[half:]):
        raise NotRepeatable(
            f"the window's batch came a second time after {changed[1]} had been moved: its passes are not accumulated, "
            "as in sharpness-aware minimisation (SAM)"
        )
