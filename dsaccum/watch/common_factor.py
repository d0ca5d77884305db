"""What a script did to all gradients alike, between the last backward and the optimizer.

Unscaling after ``GradScaler``, or a sum of token losses whose gradients are divided by the window's tokens: legitimate
ways of normalising, if the tokens weigh 1 in the end. Only a factor that is common to all micro-batches of all ranks is
one; whether it is common to all tensors, the comparison with it shows.
"""

from __future__ import annotations

from dsaccum.verification.comparison.gradient_check import GradientCheck


def common_factor(checks: list[GradientCheck], shares: list[list[float]]) -> float | None:
    """The one factor on every weight on every rank; None where it is 1, or where there is none.

    Args:
        checks: of each rank's gradient, with ``shares`` due.
        shares: [N][W], what is due to each micro-batch, in the order of the checks' weights.
    """
    due = [share for row in shares for share in row]
    known = [(w, d) for check in checks for w, d in zip(check.recovered.weights, due, strict=True) if w is not None]
    if not known:
        return None
    factor = sum(w for w, _ in known) / sum(d for _, d in known)
    tolerance = max(check.tolerance for check in checks)
    # A tolerance is of one weight; weight and mean may each be off by it.
    if factor <= 0 or any(abs(w / d / factor - 1) > 2 * tolerance for w, d in known):
        return None
    return factor if abs(factor - 1) > tolerance else None
