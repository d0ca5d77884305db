"""Weights that were planted come back, and what no weighting explains is seen, tensor by tensor.

Run: pytest tests/verification/test_weights.py. Not covered: gradients of a live engine.

The bound on a weight, used throughout. Let E be the error in G, and U the columns scaled to norm 1. Then
|error of w_i| ||g_i|| <= ||E|| / s_min(U), and s_min(U) >= 1 / condition, because s_max(U) >= 1. Summing p products in
a format of unit roundoff u leaves ||E|| <= p u S, where S = sum_i |w_i| ||g_i||. So

    |error of w_i| <= condition p u S / ||g_i||
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsaccum.verification.comparison.factors import Factors
from dsaccum.verification.comparison.weights import (
    RecoveredWeights,
    judge_tensors,
    recover_per_tensor,
    recover_robustly,
    recover_weights,
)
from tests.verification.planted import SHAPES, Gradient, gradients, norm, weighted_sum

UNIT_ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
WEIGHTS = [0.1, 0.4, 0.2, 0.3]


def error(found: RecoveredWeights, planted: Sequence[float]) -> float:
    assert found.reason is None
    return max(abs(w - due) for w, due in zip(found.weights, planted, strict=True) if w is not None)


def bound(found: RecoveredWeights, planted: Sequence[float], columns: Sequence[Gradient], dtype: torch.dtype) -> float:
    norms = [norm(column) for column in columns]
    size = sum(abs(w) * n for w, n in zip(planted, norms, strict=True))
    return found.condition * len(columns) * UNIT_ROUNDOFF[dtype] * size / min(norms)


def with_change(gradient: Gradient, name: str, factor: float) -> Gradient:
    return {**gradient, name: factor * gradient[name]}


# --- weights -------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    data=st.data(),
    weights=st.lists(st.integers(-8, 8), min_size=1, max_size=5),
)
def test_whole_numbers_come_back(data: st.DataObject, weights: list[int]) -> None:
    """Every sum is exact. A well-conditioned start, the identity, keeps the random columns apart."""
    p = len(weights)
    draw = st.lists(st.integers(-3, 3), min_size=3 * p, max_size=3 * p)
    columns = [
        {"a": 20 * torch.eye(p, dtype=torch.float64)[i], "b": torch.tensor(data.draw(draw)).double()} for i in range(p)
    ]
    gradient = weighted_sum([float(w) for w in weights], columns, torch.float64)
    found = recover_weights(Factors(gradient, columns))
    assert error(found, weights) < 1e-12
    assert found.residual is not None
    assert found.residual < 1e-14


@pytest.mark.parametrize("apart", [1.0, 0.1, 2e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_come_back_within_rounding(dtype: torch.dtype, apart: float) -> None:
    columns = gradients(4, apart=apart, dtype=dtype)
    found = recover_robustly(Factors(weighted_sum(WEIGHTS, columns, dtype), columns))
    assert 0.2 < found.condition * apart < 5
    assert error(found, WEIGHTS) < bound(found, WEIGHTS, columns, dtype)
    if dtype == torch.float32 and found.condition < 30:
        assert error(found, WEIGHTS) < 1e-7
    assert not found.outliers
    assert found.residual is not None
    assert found.residual < 4 * UNIT_ROUNDOFF[dtype]


def test_a_weight_off_by_a_thousandth_is_seen() -> None:
    columns = gradients(4, apart=0.1)
    off = [WEIGHTS[0], WEIGHTS[1] * 1.001, *WEIGHTS[2:]]
    noise = error(recover_robustly(Factors(weighted_sum(WEIGHTS, columns), columns)), WEIGHTS)
    found = recover_robustly(Factors(weighted_sum(off, columns), columns))
    assert error(found, off) < 1e-7
    assert error(found, WEIGHTS) > 5 * max(noise, 1e-7)


def test_bad_conditioning_costs_its_first_power() -> None:
    """Control: the normal equations, which cost its square, lose the weights that QR still has."""
    columns = gradients(4, apart=4e-6, dtype=torch.float64)
    gradient = weighted_sum(WEIGHTS, columns, torch.float64)
    found = recover_weights(Factors(gradient, columns))
    assert 1e5 < found.condition < 1e6
    assert error(found, WEIGHTS) < bound(found, WEIGHTS, columns, torch.float64) < 1e-8
    matrix = torch.stack([torch.cat([t.flatten() for t in column.values()]) for column in columns], dim=1)
    flat = torch.cat([t.flatten() for t in gradient.values()])
    normal = torch.linalg.solve(matrix.T @ matrix, matrix.T @ flat)
    assert float((normal - torch.tensor(WEIGHTS, dtype=torch.float64)).abs().max()) > 1e-6


def test_order_of_micro_batches_is_kept() -> None:
    columns = gradients(4)
    gradient = weighted_sum(WEIGHTS, columns)
    order = [2, 0, 3, 1]
    found = recover_robustly(Factors(gradient, [columns[i] for i in order]))
    assert error(found, [WEIGHTS[i] for i in order]) < 1e-7
    assert error(found, WEIGHTS) > 0.05


def test_sizes_of_micro_batches_do_not_matter() -> None:
    """A micro-batch with few targets has a small gradient sum; the condition number speaks of directions only."""
    columns = gradients(3)
    columns[1] = {name: 1e-3 * tensor for name, tensor in columns[1].items()}
    found = recover_robustly(Factors(weighted_sum([1.0, 1.0, 1.0], columns), columns))
    assert found.condition < 10
    assert error(found, [1.0, 1.0, 1.0]) < bound(found, [1.0] * 3, columns, torch.float32)


def test_what_lies_outside_the_span_is_residual() -> None:
    """||stray|| / S by hand; the stray part is orthogonal to nothing, so weights move, and no tensor is singled out."""
    *columns, stray = gradients(5)
    gradient = {n: t + 0.1 * stray[n] for n, t in weighted_sum(WEIGHTS, columns).items()}
    found = recover_robustly(Factors(gradient, columns))
    assert found.residual is not None
    assert 0.01 < found.residual < 0.1
    assert found.outliers == []


# --- singular cases ------------------------------------------------------------------------------------------------


def test_no_targets_no_weight() -> None:
    columns = gradients(4)
    columns[1] = {name: torch.zeros_like(tensor) for name, tensor in columns[1].items()}
    columns[2] = dict.fromkeys(columns[2])  # type: ignore[assignment]
    gradient = weighted_sum([0.25, 0.75], [columns[0], columns[3]])
    found = recover_robustly(Factors(gradient, columns))
    assert [w is None for w in found.weights] == [False, True, True, False]
    assert error(found, [0.25, 0.0, 0.0, 0.75]) < 1e-7


def test_equal_micro_batches_share_their_joint_weight() -> None:
    """Twice the same samples, and once more at three times the size: w_0 + w_2 + 3 w_3 is all that can be told."""
    a, b = gradients(2)
    triple = {name: 3 * tensor for name, tensor in a.items()}
    found = recover_robustly(Factors(weighted_sum([0.1, 0.5, 0.3, 0.2], [a, b, a, triple]), [a, b, a, triple]))
    assert found.merged == [[0, 2, 3]]
    assert error(found, [0.2, 0.5, 0.2, 0.2]) < 1e-7  # (0.1 + 0.3 + 3 x 0.2) / 5


def test_nearly_equal_micro_batches_are_not_merged() -> None:
    columns = gradients(2, apart=1e-5, dtype=torch.float64)
    found = recover_weights(Factors(weighted_sum([0.2, 0.8], columns, torch.float64), columns))
    assert found.merged == []
    assert error(found, [0.2, 0.8]) < 1e-9


def test_opposite_micro_batches_tell_nothing_of_themselves() -> None:
    """g_1 = -g_0: any equal weight gives 0. The others are told, and nothing is unexplained."""
    a, b = gradients(2)
    opposite = {name: -tensor for name, tensor in a.items()}
    found = recover_robustly(Factors(weighted_sum([0.6, 0.1, 0.3], [a, opposite, b]), [a, opposite, b]))
    assert found.merged == [[0, 1]]
    assert found.weights[:2] == [None, None]
    assert found.weights[2] == pytest.approx(0.3, abs=1e-7)
    assert found.residual is not None
    assert found.residual < 1e-7


def test_opposite_micro_batches_of_different_size_share() -> None:
    """g_1 = -g_0 / 2: 0.4 g_0 + 0.4 g_1 = 0.2 g_0."""
    a, b = gradients(2)
    half = {name: -tensor / 2 for name, tensor in a.items()}
    found = recover_robustly(Factors(weighted_sum([0.4, 0.4, 0.2], [a, half, b]), [a, half, b]))
    assert error(found, [0.4, 0.4, 0.2]) < 1e-6


def test_too_alike_is_said() -> None:
    """No two are parallel, but the third is the sum of the others but for 1e-8."""
    a, b, stray = gradients(3, dtype=torch.float64)
    columns = [a, b, {name: a[name] + b[name] + 1e-8 * stray[name] for name in a}]
    for recover in (recover_weights, recover_robustly):
        found = recover(Factors(weighted_sum([0.2, 0.3, 0.5], columns, torch.float64), columns))
        assert found.weights == [None] * 3
        assert found.condition > 1e6
        assert "too alike" in (found.reason or "")
        assert found.residual is None


def test_one_by_one() -> None:
    found = recover_robustly(Factors({"a": torch.tensor(3.0)}, [{"a": torch.tensor(2.0)}]))
    assert found.weights == [pytest.approx(1.5)]
    assert found.residual == pytest.approx(0.0, abs=1e-15)
    assert found.condition == pytest.approx(1.0)


def test_nothing_to_solve() -> None:
    column = gradients(1)[0]
    nobody = recover_robustly(Factors(column, []))
    assert (nobody.weights, nobody.reason) == ([], "no micro-batch has a gradient")
    nameless = recover_robustly(Factors({}, [{}, {}]))
    assert (nameless.weights, nameless.reason) == ([None, None], "no micro-batch has a gradient")
    empty = recover_robustly(Factors(dict.fromkeys(SHAPES), [column]))
    assert (empty.weights, empty.residual, empty.outliers) == ([0.0], 0.0, [])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_named(value: float) -> None:
    columns = gradients(2)
    gradient = weighted_sum([0.5, 0.5], columns)
    broken = {**gradient, "mlp.bias": gradient["mlp.bias"].index_fill(0, torch.tensor([3]), value)}
    found = recover_robustly(Factors(broken, columns))
    assert found.weights == [None, None]
    assert found.reason == "the gradient isn't finite in 1 tensors: mlp.bias"
    fits = judge_tensors(Factors(broken, columns), [0.5, 0.5])
    assert (fits["mlp.bias"].ratio, fits["mlp.bias"].residual) == (None, math.inf)
    assert all(fit.residual < 1e-6 for name, fit in fits.items() if name != "mlp.bias")
    by_tensor = recover_per_tensor(Factors(broken, columns))
    assert by_tensor["mlp.bias"].weights == [None, None]
    assert error(by_tensor["wte"], [0.5, 0.5]) < 1e-7
    found = recover_robustly(Factors(gradient, [columns[0], broken]))
    assert found.reason == "the gradient of micro-batch 2 isn't finite in 1 tensors: mlp.bias"
