"""What every target token of a window weighs at the optimizer: w_t = v_i s_t, where 1 / n is due to each of n."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dsaccum.watch.alignment import rows_misaligned
from dsaccum.watch.tokens import TokenReading
from dsaccum.watch.z_loss import ZReading, is_mean_of_means


@dataclass(frozen=True)
class Tokens:
    """All target tokens of a window.

    Attributes:
        due: how many there are.
        total: sum of their weights at the optimizer, padding included.
        smallest: weight of one.
        largest: likewise.
        on_padding: how many that predict padding have a weight, and their share of the sum.
        uneven: micro-batches whose own tokens weigh differently, as (micro-step, rank).
        unweighted: that are due and have no weight.
        uncalled: that have one and are not due.
        misaligned: rows whose targets belong to others.
        remainder: the largest part of a token's gradient that is no cross entropy.
        tolerance: for a token's weight, relative.
        kind: of loss.
        z: the z-loss of each micro-batch with targets.
        z_means: each micro-batch's z-loss weighs the same, whatever it holds.
        histogram: (upper edge, how many) of the weights, over what is due.
    """

    due: int
    total: float
    smallest: float
    largest: float
    on_padding: tuple[int, float]
    uneven: list[tuple[int, int]]
    unweighted: int
    uncalled: int
    misaligned: int
    remainder: float
    tolerance: float
    kind: str
    z: list[ZReading] = field(default_factory=list)
    z_means: bool = False
    histogram: list[tuple[float | None, int]] = field(default_factory=list)

    @property
    def expected(self) -> float:
        """Of each."""
        return 1 / self.due if self.due else 0.0


def token_weights(readings: list[list[TokenReading]], passing: list[list[float | None]], world: int) -> Tokens:
    """Weigh them.

    Args:
        readings: s_t, [N][W].
        passing: v_i as the first rank's gradient has them, [N][W]; where one can't be told, 1 / W.
        world: W.
    """
    weights: list[float] = []
    padding, padding_share, total = 0, 0.0, 0.0
    uneven = []
    flat = [each for row in readings for each in row]
    tolerance = max(each.tolerance for each in flat)
    for k, row in enumerate(readings):
        for r, reading in enumerate(row):
            v = passing[k][r]
            v = 1 / world if v is None else v
            weights += [v * s for s in reading.weights]
            total += v * reading.sum
            padding += len(reading.padding)
            padding_share += v * sum(reading.padding)
            own = [*reading.weights, *reading.padding]
            # Of each gradient two roundings: by the loss, and by a division on its way.
            if own and max(own) - min(own) > 2 * 2 * tolerance * max(map(abs, own)):
                uneven.append((k + 1, r))
    due = sum(each.due for each in flat)
    held = [each for each in flat if each.weights]
    per_token = [each.sum / len(each.weights) for each in held]
    return Tokens(
        z=[each.z for each in held],
        z_means=is_mean_of_means([each.z for each in held], [each.due for each in held], per_token),
        histogram=_histogram([w * due for w in weights]),
        due=due,
        total=total,
        smallest=min(weights, default=0.0),
        largest=max(weights, default=0.0),
        on_padding=(padding, padding_share / total if total else 0.0),
        uneven=uneven,
        unweighted=sum(each.unweighted for each in flat),
        uncalled=sum(each.uncalled for each in flat),
        misaligned=rows_misaligned([one for each in flat for one in each.alignments]),
        remainder=max(each.remainder for each in flat),
        tolerance=tolerance,
        kind=flat[0].kind,
    )


def _histogram(ratios: list[float], bins: int = 20) -> list[tuple[float | None, int]]:
    """Upper edge of each bin, and how many are in it."""
    if not ratios:
        return []
    counts, edges = torch.histogram(torch.tensor(ratios, dtype=torch.float64), bins)
    return [(float(edge), int(count)) for edge, count in zip(edges[1:], counts, strict=True)]
