"""A gradient that was clipped by hand, which to the weights looks like a loss that was divided once more.

Taken for that only where nothing else is in sight: the loss itself weighs every token as is due, all gradients were
made smaller by one factor after backward, no count and no small fraction is that factor, and the norm that is left is a
round number, as limits are. Of wrong factors, one in some hundreds leaves such a norm by chance.
"""

from __future__ import annotations

from fractions import Fraction

from dsaccum.watch.divisor import divisors
from dsaccum.watch.judge import Judged

LARGEST_DENOMINATOR = 64
"""Of mistakes such as 1 / N, 1 / (N W) or 3 / 4 of a window."""
ROUND = 2e-5
"""What a norm may be off a limit, relative: scripts add 1e-6 to the norm that they divide by."""


def clipped_by_hand(judged: Judged) -> str | None:
    """Says so, if it looks so."""
    factor, tokens, checks = judged.factor, judged.tokens, judged.weighting
    if factor is None or factor >= 1 or tokens is None or checks is None or judged.facts.clipping:
        return None
    tolerance = 2 * max(check.tolerance for check in checks)
    if abs(tokens.total / factor - 1) > tolerance or not all(check.passed for check in judged.way):
        return None
    readings = [each for rank in judged.window.ranks for each in rank.tokens if each is not None]
    fraction = Fraction(factor).limit_denominator(LARGEST_DENOMINATOR)
    if abs(fraction / factor - 1) <= tolerance or divisors(tokens, readings, tolerance):
        return None
    norms = [check.norm for check in judged.way]
    if not all(_is_round(norm) for norm in norms):
        return None
    return (
        f"after backward everything was multiplied by {factor:.4g}, and the norm is {norms[0]:.2g} then: clipped by "
        "hand, as it seems; look at a window in which that does not act"
    )


def _is_round(norm: float) -> bool:
    """Of two digits."""
    return norm > 0 and abs(float(f"{norm:.1e}") / norm - 1) <= ROUND
