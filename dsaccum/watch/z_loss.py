"""A z-loss beside the cross entropy, Z (log sum exp z)^2: does it weigh what the cross entropy does, in every token?

Its gradient at the logits is 2 Z lse p, so that with s for the cross entropy and a for all that pulls along p,

    a - s = 2 Z lse,    Z / s = (a - s) / (2 s lse)

Z / s is due to be the same for all tokens of a window. Whether it is what the script says can't be known from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ZReading:
    """One micro-batch's.

    Attributes:
        coefficient: Z / s by least squares over its tokens; 0 where there is no z-loss.
        error: what rounding may do to it.
        proportional: each token's pull is as a z-loss has it.
    """

    coefficient: float = 0.0
    error: float = 0.0
    proportional: bool = True

    @property
    def there(self) -> bool:
        """Not by rounding."""
        return abs(self.coefficient) > 3 * self.error


def read_z(excess: Tensor, noise: Tensor, log_sums: Tensor) -> ZReading:
    """Of one forward.

    Args:
        excess: (a - s) / s of each target token.
        noise: what rounding may do to it.
        log_sums: lse of each.
    """
    size = float((2 * log_sums).square().sum())
    if not size:
        return ZReading()
    coefficient = float((excess * 2 * log_sums).sum()) / size
    left = (excess - coefficient * 2 * log_sums).abs()
    return ZReading(
        coefficient,
        float((noise * 2 * log_sums.abs()).sum()) / size,
        bool((left <= 4 * noise + 1e-3 * excess.abs().max()).all()),
    )


def z_together(readings: Sequence[ZReading]) -> ZReading:
    """Of several forwards in one micro-step: where they differ, no one coefficient is right."""
    differ = unequal(readings)
    first = max(readings, key=lambda each: abs(each.coefficient))
    return ZReading(first.coefficient, first.error, first.proportional and not differ)


def unequal(readings: Sequence[ZReading]) -> bool:
    """Beyond rounding."""
    highest = max(each.coefficient - 2 * each.error for each in readings)
    lowest = min(each.coefficient + 2 * each.error for each in readings)
    return highest > lowest + 1e-4 * abs(lowest)


def is_mean_of_means(readings: Sequence[ZReading], targets: Sequence[int], weights: Sequence[float]) -> bool:
    """Each micro-batch's z-loss weighs the same, however many tokens it has.

    Args:
        readings: of all micro-batches.
        targets: of each.
        weights: s of a token in each.
    """
    whole = [z.coefficient * n * s for z, n, s in zip(readings, targets, weights, strict=True) if n]
    errors = [z.error / abs(z.coefficient) for z in readings if z.coefficient]
    return bool(whole) and max(whole) - min(whole) <= (1e-3 + 4 * max(errors, default=0.0)) * max(map(abs, whole))


def z_fault(readings: Sequence[ZReading]) -> tuple[str, str] | None:
    """The state of a claim that all tokens weigh the same, where the z-loss is against it, and the reason."""
    there = [each for each in readings if each.there]
    if not there:
        return None
    if unequal(readings):
        shares = [each.coefficient for each in readings]
        return "fail", (
            f"the z-loss of a token counts {min(shares):.3g} to {max(shares):.3g} times what its cross entropy does, "
            "by micro-batch, where one coefficient is due"
        )
    if not all(each.proportional for each in readings):
        return "untested", "something beside the cross entropy pulls at the logits that is no z-loss, or one of its own"
    return None


def z_note(readings: Sequence[ZReading]) -> list[str]:
    """What an even z-loss counts: whether that is what the script says is for people to see."""
    if not any(each.there for each in readings) or z_fault(readings):
        return []
    share = sum(each.coefficient for each in readings) / len(readings)
    return [
        f"the z-loss counts {share:.3g} (log sum exp)^2 for each token's cross entropy; compare with its coefficient"
    ]
