"""One lost or doubled tensor doesn't read as wrong weights, and is named; tensors are judged one by one.

Run: pytest tests/verification/test_outliers.py. Not covered: bounds, which come from the precision.
"""

from __future__ import annotations

import math

import pytest
import torch

from dsaccum.verification.comparison.factors import Factors
from dsaccum.verification.comparison.least_squares import System
from dsaccum.verification.comparison.weights import judge_tensors, recover_per_tensor, recover_robustly, recover_weights
from tests.verification.planted import SHAPES, gradients, weighted_sum
from tests.verification.test_weights import WEIGHTS, error, with_change

UNDISTURBED = {torch.float32: 1e-7, torch.bfloat16: 5e-3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [0.0, 2.0, -1.0, 100.0])
@pytest.mark.parametrize("name", ["wte", "ln.bias", "mlp_proj.weight", "attn_proj.bias"])
def test_one_wrong_tensor_is_the_only_outlier(name: str, factor: float, dtype: torch.dtype) -> None:
    columns = gradients(4, apart=0.5, dtype=dtype)
    wrong = with_change(weighted_sum(WEIGHTS, columns, dtype), name, factor)
    found = recover_robustly(Factors(wrong, columns))
    assert found.outliers == [name]
    assert error(found, WEIGHTS) < UNDISTURBED[dtype]
    fits = judge_tensors(Factors(wrong, columns), found.weights)
    assert fits[name].ratio == pytest.approx(factor, rel=0.01, abs=1e-6)
    assert all(fit.ratio == pytest.approx(1.0, abs=0.02) for other, fit in fits.items() if other != name)


@pytest.mark.parametrize("name", ["wte", "mlp_proj.weight"])
def test_plain_least_squares_is_bent(name: str) -> None:
    """The control: what the robust way is there for."""
    columns = gradients(4, apart=0.5)
    wrong = with_change(weighted_sum(WEIGHTS, columns), name, 2.0)
    assert error(recover_weights(Factors(wrong, columns)), WEIGHTS) > 1e-3  # not 1e-7


def test_a_tensor_that_lost_one_micro_batch_is_an_outlier() -> None:
    columns = gradients(4)
    gradient = weighted_sum(WEIGHTS, columns)
    gradient["attn.weight"] = gradient["attn.weight"] - WEIGHTS[1] * columns[1]["attn.weight"]
    factors = Factors(gradient, columns)
    found = recover_robustly(factors)
    assert found.outliers == ["attn.weight"]
    assert error(found, WEIGHTS) < 1e-7
    by_tensor = recover_per_tensor(factors)
    assert error(by_tensor["attn.weight"], [0.1, 0.0, 0.2, 0.3]) < 1e-6
    assert error(by_tensor["mlp.weight"], WEIGHTS) < 1e-6


def test_several_outliers_of_different_sizes_are_found() -> None:
    columns = gradients(4)
    gradient = weighted_sum(WEIGHTS, columns)
    for name, factor in {"wpe": 0.0, "attn.bias": 1.001, "mlp_proj.bias": 30.0}.items():
        gradient = with_change(gradient, name, factor)
    found = recover_robustly(Factors(gradient, columns))
    assert found.outliers == ["wpe", "attn.bias", "mlp_proj.bias"]
    assert error(found, WEIGHTS) < 1e-7


def test_wrong_weights_are_no_outliers() -> None:
    """Every tensor agrees on them."""
    columns = gradients(4)
    for weights in ([1.0] * 4, [0.0, 0.0, 0.0, 1.0], [0.0625] * 4):
        found = recover_robustly(Factors(weighted_sum(weights, columns), columns))
        assert (found.outliers, error(found, weights) < 1e-6) == ([], True)


@pytest.mark.parametrize(
    ("sizes", "wrong"),
    [
        ([1, 1, 1, 1, 1, 1], {"a": 2, "b": 2, "c": 2}),  # half against half
        ([9, 9, 9, 1, 1, 1, 1, 1], {"d": 2, "e": 2, "f": 2, "g": 2, "h": 2}),  # many small ones
        ([5, 5, 1, 1, 1, 1, 1, 1], {"a": 0, "b": 2}),  # few, but most of the gradient
    ],
)
def test_what_may_be_either_sides_fault_names_nobody(sizes: list[int], wrong: dict[str, int]) -> None:
    """Plain least squares, and a residual that tells."""
    columns = [
        {name: size * torch.randn(64, generator=g) for name, size in zip("abcdefgh", sizes, strict=False)}
        for g in _generators(3)
    ]
    gradient = weighted_sum([0.2, 0.3, 0.5], columns)
    for name, factor in wrong.items():
        gradient = with_change(gradient, name, factor)
    factors = Factors(gradient, columns)
    assert recover_robustly(factors) == recover_weights(factors)
    assert (recover_robustly(factors).residual or 0.0) > 0.05


def test_far_above_nothing_is_not_yet_an_outlier() -> None:
    """Where the others are exact, a few ulp of float32 in one tensor stand out; they are judged, not left out."""
    columns = gradients(4, dtype=torch.float64)
    gradient = with_change(weighted_sum(WEIGHTS, columns, torch.float64), "mlp.bias", 1 + 5e-7)
    assert recover_robustly(Factors(gradient, columns)).outliers == []


def test_a_gradient_of_other_samples_has_no_outliers() -> None:
    """No weights explain it, and no tensor more than another; those with few elements fit anything, and can't vote."""
    for seed in range(20):
        *columns, stray = gradients(9, seed=seed)
        found = recover_robustly(Factors(stray, columns))
        assert found.outliers == []


def test_tensors_too_small_to_disagree_have_no_say() -> None:
    """Four numbers fit four weights whatever they are: against them the other tensor isn't called an outlier."""
    large = [*(100 * torch.eye(4)), torch.tensor([40.0, -70.0, 90.0, 20.0])]
    *columns, gradient = [
        {"a": row[:2], "b": row[2:], "c": torch.randn(40, generator=g)}
        for row, g in zip(large, _generators(5), strict=True)
    ]
    found = recover_robustly(Factors(gradient, columns))
    assert found.outliers == []
    assert (found.residual or 0.0) > 0.01


def test_least_absolute_finds_the_fermat_point() -> None:
    """Three tensors say w = (0, 0), (1, 0) and (0, 1): the sum of distances is least at x = y = (3 - sqrt 3) / 6."""
    columns = [dict.fromkeys("abc", torch.tensor([1.0, 0.0])), dict.fromkeys("abc", torch.tensor([0.0, 1.0]))]
    gradient = {"a": torch.tensor([0.0, 0.0]), "b": torch.tensor([1.0, 0.0]), "c": torch.tensor([0.0, 1.0])}
    found = System(Factors(gradient, columns), range(3)).least_absolute()
    assert found.tolist() == [pytest.approx((3 - math.sqrt(3)) / 6, abs=1e-6)] * 2


def test_rounding_noise_is_no_outlier() -> None:
    """A key bias, zero by mathematics: columns and gradient are unrelated rounding errors, 1e-8 of the whole."""
    columns = gradients(4)
    noise = [1e-9 * torch.randn(16, generator=g) for g in _generators(5)]
    columns = [{**column, "key.bias": own} for column, own in zip(columns, noise, strict=False)]
    factors = Factors({**weighted_sum(WEIGHTS, columns), "key.bias": noise[4]}, columns)
    assert recover_robustly(factors).outliers == []
    fit = judge_tensors(factors, WEIGHTS)["key.bias"]
    assert fit.ratio is None  # of noise to noise
    assert fit.residual < 0.01  # on the global scale; 2.2 on its own
    assert "below 1e-06" in (recover_per_tensor(factors)["key.bias"].reason or "")


def test_a_gradient_where_none_is_due_is_an_outlier() -> None:
    columns = gradients(4)
    gradient = {**weighted_sum(WEIGHTS, columns), "unused": torch.ones(5)}
    found = recover_robustly(Factors(gradient, columns))
    assert found.outliers == ["unused"]
    assert error(found, WEIGHTS) < 1e-7


# --- one by one ----------------------------------------------------------------------------------------------------


def test_ratio_and_residual_by_hand() -> None:
    """P = 0.5 (4, 0) + 0.5 (0, 2) = (2, 1), S = 0.5 x 4 + 0.5 x 2 = 3. G = (4, 2) is 2 P, and sqrt(5) from it."""
    columns = [{"a": torch.tensor([4.0, 0.0]), "b": torch.ones(1)}, {"a": torch.tensor([0.0, 2.0]), "b": torch.ones(1)}]
    fits = judge_tensors(Factors({"a": torch.tensor([4.0, 2.0]), "b": torch.ones(1)}, columns), [0.5, 0.5])
    assert fits["a"].ratio == pytest.approx(2.0)
    assert fits["a"].residual == pytest.approx(math.sqrt(5) / 3)
    assert (fits["b"].ratio, fits["b"].residual) == (pytest.approx(1.0), pytest.approx(0.0, abs=1e-15))
    whole = 0.5 * math.sqrt(17) + 0.5 * math.sqrt(5)  # norms of both columns over all tensors
    assert fits["a"].share == pytest.approx(3 / whole)


def test_faint_tensors_are_judged_on_the_global_scale() -> None:
    """S_b is 1e-9 of S = 1: an error of 1e-8 is 1e-8 / 1e-6, not 10. Where nothing is due, it is likewise."""
    column = {"a": torch.tensor([1.0]), "b": torch.tensor([1e-9]), "c": torch.zeros(1)}
    gradient = {"a": torch.tensor([1.0]), "b": torch.tensor([1.1e-8]), "c": torch.tensor([1e-8])}
    fits = judge_tensors(Factors(gradient, [column]), [1.0])
    assert fits["b"].residual == pytest.approx(1e-2, rel=1e-4)
    assert fits["c"].residual == pytest.approx(1e-2, rel=1e-4)
    assert fits["c"].ratio is None
    assert judge_tensors(Factors(gradient, [column]), [None])["a"].residual == math.inf


def test_per_tensor_says_where_it_cannot_tell() -> None:
    columns = gradients(32)
    by_tensor = recover_per_tensor(Factors(weighted_sum([1 / 32] * 32, columns), columns))
    assert by_tensor.keys() == SHAPES.keys()
    for name, shape in SHAPES.items():
        assert (by_tensor[name].reason is not None) == (math.prod(shape) < 32)


# --- extra vectors -------------------------------------------------------------------------------------------------


def test_a_left_over_of_the_last_window_is_told_apart() -> None:
    *columns, stale = gradients(5)
    gradient = weighted_sum([*WEIGHTS, 0.7], [*columns, stale])
    factors = Factors(gradient, columns, [stale])
    found = recover_robustly(factors)
    assert error(found, WEIGHTS) < 1e-7
    assert found.extra == [pytest.approx(0.7, abs=1e-7)]
    assert max(fit.residual for fit in judge_tensors(factors, found.weights, found.extra).values()) < 1e-6
    assert max(fit.residual for fit in judge_tensors(factors, found.weights).values()) > 0.1  # the control
    broken = {**stale, "wpe": stale["wpe"] * math.nan}
    unused = judge_tensors(Factors(weighted_sum(WEIGHTS, columns), columns, [broken]), WEIGHTS)
    assert max(fit.residual for fit in unused.values()) < 1e-6  # what isn't asked for can't spoil
    clean = recover_robustly(Factors(weighted_sum(WEIGHTS, columns), columns, [stale]))
    assert clean.extra == [pytest.approx(0.0, abs=1e-7)]


def test_an_extra_vector_is_never_merged() -> None:
    columns = gradients(2)
    found = recover_robustly(Factors(weighted_sum([0.5, 0.5], columns), columns, [columns[0]]))
    assert found.weights == [None, None]
    assert found.extra == [None]
    assert "too alike" in (found.reason or "")


def test_weights_of_the_wrong_number_are_refused() -> None:
    factors = Factors({"a": torch.ones(3)}, [{"a": torch.ones(3)}])
    with pytest.raises(ValueError, match="2 weights"):
        judge_tensors(factors, [1.0, 1.0])
    with pytest.raises(ValueError, match="1 extra"):
        judge_tensors(factors, [1.0], [1.0])


def _generators(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in range(count)]
