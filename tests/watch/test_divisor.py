"""What a wrong divisor is told to be, and where nothing is told. Run: pytest tests/watch/test_divisor.py."""

from __future__ import annotations

import pytest

from dsaccum.watch.divisor import divisors
from dsaccum.watch.token_weights import token_weights
from dsaccum.watch.tokens import TokenReading

TOLERANCE = 1e-6
PROMPTS = "the sum of attention_mask in the window"


def found(weight: float, spread: float = 0.0, tolerance: float = TOLERANCE) -> dict[str, int]:
    """Two micro-batches of 12 and 20 targets, 57 tokens in 64 positions, 4 rows."""
    readings = [
        TokenReading([weight] * 12, due=12, before_shift=14, positions=32, all_rows=2, attended=(27, 25)),
        TokenReading([weight + spread] * 20, due=20, before_shift=22, positions=32, all_rows=2, attended=(30, 28)),
    ]
    return divisors(token_weights([[each] for each in readings], [[1.0], [1.0]], 1), readings, tolerance)


@pytest.mark.parametrize("divisor", [57, 53, 64, 60, 36, 4])
def test_each_count_is_recognised(divisor: int) -> None:
    assert list(found(1 / divisor).values()) == [divisor]


def test_nothing_else_is() -> None:
    assert found(1 / 57).keys() == {PROMPTS}
    assert found(1 / 56) == {}
    assert found(1 / 57 * (1 + 1e-5)) == {}
    assert found(1 / 32) == {}  # as is due
    assert found(1 / 57, spread=1e-4) == {}
    assert found(1 / 57, tolerance=3e-3) == {}  # 57 and 57.3 could not be told apart
