"""How far rounding moves recovered weights: draws of the same accumulation.

Run: pytest -n 0 tests/verification/test_rounding.py. Not covered: that a live engine's own error is below it
(test_equivalent.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsaccum.verification.comparison.factors import Factors
from dsaccum.verification.comparison.rounding import Noise, Rounding, rounding_noise
from dsaccum.verification.comparison.weights import recover_weights, weight_error

EXACT = Rounding(torch.float64, torch.float64, torch.float64)
FP32 = Rounding(torch.float32, torch.float32, torch.float32)
BF16 = Rounding(torch.bfloat16, torch.float32, torch.bfloat16)
BF16_ACCUMULATED = Rounding(torch.bfloat16, torch.bfloat16, torch.bfloat16)


def columns(count: int, elements: int = 20_000, seed: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(elements, generator=generator, dtype=torch.float64)
    return [
        {"a": common + torch.randn(elements, generator=generator, dtype=torch.float64), "b": torch.ones(3).double() * i}
        for i in range(count)
    ]


def noise(rounding: Rounding, count: int = 8, world_size: int = 2) -> Noise:
    return rounding_noise(columns(count), [1 / count] * count, world_size, rounding)


def test_exact_arithmetic_moves_nothing() -> None:
    found = noise(EXACT)
    assert found.weights < 1e-13
    assert found.residual < 1e-13


def test_coarser_formats_move_more() -> None:
    """Unit roundoffs are 2^-24 and 2^-8; a residual is an average over elements and below u of its format."""
    fp32, bf16, accumulated = noise(FP32), noise(BF16), noise(BF16_ACCUMULATED)
    assert fp32.residual < 2**-24
    assert 2**-12 < bf16.residual < 2**-8
    assert accumulated.residual > bf16.residual
    assert fp32.weights < 1e-6 < bf16.weights < 2**-8


def test_a_draw_of_another_order_stays_within() -> None:
    """One accumulation in bf16 that no draw repeats: its weights are off by no more than what was drawn, times 2.5."""
    count = 8
    found = noise(BF16)
    for seed in range(5):
        parts = columns(count)
        scale = 1.0 + 0.31 * (seed + 1) / 7
        total: dict[str, Tensor] = {}
        for part in reversed(parts):
            for name, tensor in part.items():
                term = (scale * tensor / count).bfloat16().float()
                total[name] = total.get(name, torch.zeros_like(term)) + term
        gradient = {name: tensor.bfloat16().double() / scale for name, tensor in total.items()}
        error = weight_error(recover_weights(Factors(gradient, parts)).weights, [1 / count] * count)
        assert error is not None
        assert error < 2.5 * found.weights


def test_a_wrong_weight_is_far_outside() -> None:
    """Control: one weight off by 1 % is more than 2.5 times what bf16 may do here."""
    assert 2.5 * noise(BF16).weights < 0.01


def test_micro_batches_without_targets_are_left_out() -> None:
    parts = columns(4)
    with_empty = rounding_noise([*parts, {}], [0.25] * 4 + [0.0], 1, BF16)
    assert with_empty.weights < 2**-8


def test_nothing_is_no_noise() -> None:
    assert rounding_noise([{}], [0.0], 1, BF16) == Noise(0.0, 0.0)
