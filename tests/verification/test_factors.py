"""Triangular factors keep every norm and inner product of the vectors that they stand for.

Run: pytest tests/verification/test_factors.py. Not covered: what is solved with them (test_weights.py).

Both sides work in float64. A norm of a combination of m vectors is in error by about m 2^-53 sum_i |c_i| ||v_i||.
"""

from __future__ import annotations

import math

import pytest
import torch

from dsaccum.verification.comparison.factors import ROWS, Factors
from tests.verification.planted import gradients, norm, weighted_sum

WEIGHTS = [0.25, -1.0, 3.0, 0.5]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norm_of_a_combination(dtype: torch.dtype) -> None:
    """What clipping after each micro-step needs: the norm of a partial sum, without the gradients."""
    columns = gradients(4, dtype=dtype)
    factors = Factors(columns[0], columns)
    for partial in ([1.0, 0, 0, 0], [0.25, 0.25, 0, 0], WEIGHTS):
        whole = norm(weighted_sum(partial, columns, torch.float64))
        assert factors.norm(partial) == pytest.approx(whole, rel=1e-13)
    # Nothing is lost to cancellation but what float64 loses: the Gram matrix would leave 1e-8 here.
    assert Factors(columns[0], [columns[0]] * 4).norm([1.0, -1.0, 1.0, -1.0]) < 1e-13 * norm(columns[0])


def test_inner_product_of_two_combinations() -> None:
    columns = gradients(4)
    other = [1.0, 2.0, -0.5, 0.0]
    one, two = weighted_sum(WEIGHTS, columns, torch.float64), weighted_sum(other, columns, torch.float64)
    product = sum(float((one[name] * two[name]).sum()) for name in one)
    assert Factors(columns[0], columns).inner(WEIGHTS, other) == pytest.approx(product, rel=1e-12)


@pytest.mark.parametrize("size", [1, 3, ROWS - 1, ROWS, ROWS + 1, 3 * ROWS + 5])
def test_any_size_of_tensor(size: int) -> None:
    vectors = [{"a": torch.randn(size, generator=torch.Generator().manual_seed(seed))} for seed in range(5)]
    triangles = Factors(vectors[4], vectors[:4]).triangles
    matrix = torch.stack([vector["a"].double() for vector in vectors], dim=1)
    assert triangles.shape == (1, 5, 5)
    torch.testing.assert_close(triangles[0].T @ triangles[0], matrix.T @ matrix, rtol=1e-12, atol=1e-12)


def test_absent_means_zero() -> None:
    whole = {"a": torch.ones(3), "b": torch.ones(2)}
    absent = Factors(whole, [{"a": torch.ones(3), "b": None}, {"b": torch.ones(2)}])
    zeros = Factors(whole, [{"a": torch.ones(3), "b": torch.zeros(2)}, {"a": torch.zeros(3), "b": torch.ones(2)}])
    assert torch.equal(absent.triangles, zeros.triangles)
    assert Factors({"a": None}, [{"a": None}]).norm([1.0]) == 0.0


def test_a_vector_that_is_not_finite_spoils_only_itself() -> None:
    broken = {"a": torch.tensor([1.0, math.nan]), "b": torch.ones(2)}
    good = {"a": torch.ones(2), "b": torch.ones(2)}
    assert Factors(broken, [good]).norm([1.0]) == pytest.approx(2.0)
    assert math.isnan(Factors(good, [good, broken]).norm([1.0, 1.0]))
    assert Factors(broken, [good]).not_finite([0, 1]) == "the gradient isn't finite in 1 tensors: a"
    assert Factors(broken, [good]).not_finite([1]) is None
    assert Factors(good, [good], [broken]).not_finite([0, 1]) == "an extra vector isn't finite in 1 tensors: a"


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a has different numbers of elements: \[2, 3\]"):
        Factors({"a": torch.ones(2)}, [{"a": torch.ones(3)}])
    with pytest.raises(ValueError, match="2 weights for 1 micro-batches"):
        Factors({"a": torch.ones(2)}, [{"a": torch.ones(2)}]).norm([1.0, 1.0])
