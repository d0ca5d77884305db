"""After one step and after five, every parameter is where plain PyTorch takes it, at any N and stage.

Run: pytest -n 0 tests/seeds/test_updates_per_parameter.py. Ragged data, clipping on. Not covered: bf16, whose updates
``dsaccum verify`` judges (tests/verification/test_equivalent.py); several ranks (test_ranks_against_one_process.py).

Bound of each parameter: three times what rounding alone does to the plain run (plain.py); it is drawn for each case.
"""

from __future__ import annotations

from functools import cache

import pytest
from torch import Tensor

from dsaccum.engine.process import Ranks
from dsaccum.loss import CausalLMLoss
from tests.cases import Case
from tests.seeds.plain import Honest, SgdCase, honest_runs
from tests.seeds.watched import run_watched

SPLITS = [(1, 16, 0), (4, 4, 0), (16, 1, 0), (4, 4, 1), (4, 4, 2), (4, 4, 3)]


class OnePercentMore(CausalLMLoss):
    """The first micro-batch of each window weighs 1 % too much."""

    def __init__(self, accumulation_steps: int) -> None:
        self._steps, self._calls = accumulation_steps, 0

    def sum(self, outputs, micro_batch):
        first = self._calls % self._steps == 0
        self._calls += 1
        return super().sum(outputs, micro_batch) * (1.01 if first else 1.0)


@cache
def honest(kind: type[Case], steps: int) -> Honest:
    return honest_runs(kind(padded=True, steps=steps))


def excess(found: dict[str, Tensor], truth: Honest) -> dict[str, float]:
    """Distance over bound, by parameter; tied weights are one."""
    bounds = truth.parameter_bounds()
    return {name: float((found[name] - value).norm()) / bounds[name] for name, value in truth.run.parameters.items()}


@pytest.mark.parametrize("kind", [Case, SgdCase], ids=["adamw", "sgd"])
@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize(("micro_steps", "rows", "stage"), SPLITS)
def test_every_parameter_moves_as_with_the_big_batch(
    one_rank: Ranks, kind: type[Case], steps: int, micro_steps: int, rows: int, stage: int
) -> None:
    case = kind(accumulation_steps=micro_steps, micro_batch=rows, stage=stage, padded=True, steps=steps)
    _, found = run_watched(one_rank, case)
    off = {name: value for name, value in excess(found, honest(kind, steps)).items() if value > 1}
    assert off == {}


@pytest.mark.parametrize("steps", [1, 5])
def test_one_percent_on_one_micro_batch_is_noticed(one_rank: Ranks, steps: int) -> None:
    """Control: a quarter of the window weighs 1 % too much, and nearly every parameter is out of its bound by far."""
    case = SgdCase(accumulation_steps=4, micro_batch=4, padded=True, steps=steps)
    _, found = run_watched(one_rank, case, loss=OnePercentMore(4))
    values = sorted(excess(found, honest(SgdCase, steps)).values())
    assert values[len(values) // 4] > 5, "three quarters of the parameters are out by a factor of five at least"
