"""What a script divided by, where all tokens weigh the same and too much or too little: is it something it counted?

The weight of all tokens of n in all is n / D. D is looked for among what can be counted in the window's batches.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsaccum.watch.token_weights import Tokens
from dsaccum.watch.tokens import TokenReading

FIX = (
    "divide by the window's targets instead, over all its micro-batches and ranks: those with a label after the shift, "
    "(labels[:, 1:] != -100).sum()"
)


def window_counts(readings: Sequence[TokenReading]) -> dict[str, int]:
    """By what they are."""
    positions, rows = sum(each.positions for each in readings), sum(each.all_rows for each in readings)
    return {
        "the sum of attention_mask in the window": sum(each.attended[0] for each in readings),
        "the sum of attention_mask[:, 1:] in the window": sum(each.attended[1] for each in readings),
        "all positions of the window": positions,
        "all positions of the window but each row's first": positions - rows,
        "all labels of the window but -100, before the shift": sum(each.before_shift for each in readings),
        "all rows of the window": rows,
    }


def divisors(tokens: Tokens, readings: Sequence[TokenReading], tolerance: float) -> dict[str, int]:
    """Counts that are exactly what the tokens' weights were divided by.

    Args:
        tokens: of the window.
        readings: of all micro-batches.
        tolerance: of the sum of weights, relative.
    """
    if not tokens.total or tokens.largest - tokens.smallest > 4 * tolerance * abs(tokens.largest):
        return {}
    divisor = tokens.due / tokens.total
    if 2 * tolerance * divisor > 0.25:
        return {}  # the next count would fit, too
    counts = window_counts(readings)
    return {
        name: count
        for name, count in counts.items()
        if count and count != tokens.due and abs(divisor / count - 1) <= 2 * tolerance
    }
