"""Parameters change at a window's last micro-step and at no other: F, F, F, T at N = 4, at every ZeRO stage.

Run: pytest -n 0 tests/seeds/test_one_update_per_window.py. No bound: digests of what the optimizer steps are compared,
before each forward and before each step. Not covered: who communicates when (tests/instruments/test_collectives.py).
"""

from __future__ import annotations

import pytest
import torch

from dsaccum.batch import is_update_boundary
from dsaccum.engine.process import Ranks
from dsaccum.engine.window_engine import WindowEngine
from tests.cases import Case
from tests.seeds.watched import digest, run_watched

STEPS, N = 3, 4


def changes(ranks: Ranks, stage: int, *, step_inside: bool = False) -> list[tuple[int, int]]:
    """(step, micro-step) of each change; with the control, the optimizer is made to step once more inside step 2."""
    case = Case(accumulation_steps=N, micro_batch=4, stage=stage, steps=STEPS, padded=True)
    seen: list[str] = []
    changed: list[tuple[int, int]] = []
    place = (0, 0)

    def look(engine: WindowEngine, step: int, micro_step: int, phase: str) -> None:
        nonlocal place
        if phase in ("forward", "step", "exchange", "end"):
            seen.append(digest(engine))
            if len(seen) > 1 and seen[-1] != seen[-2]:
                changed.append(place)
            place = (step, micro_step)
        if step_inside and (step, micro_step, phase) == (2, 2, "forward"):
            with torch.no_grad():
                for parameter in engine.engine.module.parameters():
                    parameter.mul_(0.5)

    run_watched(ranks, case, look)
    return changed


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_change_at_the_boundary_alone(one_rank: Ranks, stage: int) -> None:
    assert changes(one_rank, stage) == [(step, N) for step in range(1, STEPS + 1)]
    assert [is_update_boundary(micro_step, N) for micro_step in range(1, 5)] == [False, False, False, True]


def test_a_change_inside_the_window_is_noticed(one_rank: Ranks) -> None:
    """Control: something touches the parameters before the forward of micro-step 2 of step 2."""
    assert changes(one_rank, 0, step_inside=True) == [(1, 4), (2, 2), (2, 4), (3, 4)]
