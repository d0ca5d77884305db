"""What each mistake of weighting would make of a window's weights, computed from N, W and the counts alone.

With n targets of T in a micro-batch, its mean gradient is due the weight n / T. A mistake is a pattern of weights (who
counts how much) and a scale (what everything is divided by):

    patterns    due                 n / T
                mean-of-means       1 / (N W)
                rank-mean-of-means  n / (T_r W), T_r rank r's own targets
                before the shift    n / T', T' counts labels without shifting; or each micro-batch by its own n'
                padding counted     n / P, P counts positions; or each micro-batch by its own
                full divisor        n / T times what a short window holds of a full one: samples, micro-batches or steps
    scales      x N: nobody divided    / N: divided twice    x W: summed over ranks    / W: averaged over ranks twice
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from dsaccum.verification.comparison.evidence import Counts
from dsaccum.verification.comparison.factors import Factors

Matrix = list[list[float]]
"""[N][W]"""


@dataclass(frozen=True)
class Signature:
    """Weights as one rank would get them if these faults were there together."""

    faults: tuple[str, ...]
    weights: Matrix


def signatures(counts: Counts, rank: int) -> Iterator[Signature]:
    """All signatures of a window, as rank ``rank`` would see them; among them ones equal to the due weights."""
    steps, ranks = len(counts.targets), len(counts.targets[0])
    patterns = list(_patterns(counts))
    for pattern in patterns:
        for scale in _scales(steps, ranks):
            yield Signature((*pattern.faults, *scale[0]), _scaled(pattern.weights, scale[1]))
    due = patterns[0].weights
    for division in (1.0, float(steps)) if steps > 1 else ():
        kept = [[0.0] * ranks] * (steps - 1) + [[weight * division for weight in due[-1]]]
        yield Signature(("only-last-micro-batch",), kept)
    for share in (1.0, float(ranks)) if ranks > 1 else ():  # it may or may not know the others' targets
        own = [[weight * share if r == rank else 0.0 for r, weight in enumerate(step)] for step in due]
        yield Signature(("ranks-not-reduced",), own)


def dropped(weights: list[float | None], due: list[float], tolerance: float) -> list[int]:
    """Micro-batches that add nothing while all others weigh what they should; empty if it isn't so."""
    missing = [i for i, w in enumerate(weights) if w is not None and due[i] > 0 and abs(w) <= tolerance * due[i]]
    others = [i for i, w in enumerate(weights) if w is not None and due[i] > 0 and i not in missing]
    right = all(abs((weights[i] or 0.0) / due[i] - 1) <= tolerance for i in others)
    return missing if missing and others and right else []


def clipped_every_micro_step(factors: Factors, due: Matrix, limit: float) -> Iterator[Matrix]:
    """Each rank clips its own buffer after every micro-step: A_k = c_k (A_(k-1) + W w_k g_k), then ranks average.

    After the last one the buffer is not clipped, or by itself, or when the ranks have been averaged already.
    """
    steps, ranks = len(due), len(due[0])
    buffers = [[0.0] * (steps * ranks) for _ in range(ranks)]
    for step in range(steps):
        buffers = [_clipped(factors, buffer, limit) for buffer in buffers] if step else buffers
        for rank, buffer in enumerate(buffers):
            buffer[step * ranks + rank] = due[step][rank] * ranks
    averaged = _average(buffers)
    yield _matrix(averaged, ranks)
    yield _matrix(_average([_clipped(factors, buffer, limit) for buffer in buffers]), ranks)
    yield _matrix(_clipped(factors, averaged, limit), ranks)


def clipped_before_reduction(factors: Factors, due: Matrix, limit: float) -> Matrix:
    """Each rank clips its whole window, then ranks average."""
    ranks = len(due[0])
    flat = [weight for step in due for weight in step]
    own = [[w * ranks if i % ranks == rank else 0.0 for i, w in enumerate(flat)] for rank in range(ranks)]
    return _matrix(_average([_clipped(factors, buffer, limit) for buffer in own]), ranks)


def _clipped(factors: Factors, weights: list[float], limit: float) -> list[float]:
    coefficient = min(1.0, limit / (factors.norm(weights) + 1e-6))
    return [weight * coefficient for weight in weights]


def _average(buffers: list[list[float]]) -> list[float]:
    return [sum(column) / len(buffers) for column in zip(*buffers, strict=True)]


def _matrix(flat: list[float], ranks: int) -> Matrix:
    return [flat[start : start + ranks] for start in range(0, len(flat), ranks)]


def _patterns(counts: Counts) -> Iterator[Signature]:
    targets = counts.targets
    steps, ranks = len(targets), len(targets[0])
    window = max(_sum(targets), 1)
    of_rank = [max(sum(step[r] for step in targets), 1) for r in range(ranks)]
    due = [[n / window for n in step] for step in targets]
    yield Signature((), due)
    alike = [[1 / (steps * ranks) if n else 0.0 for n in step] for step in targets]
    by_rank = [[n / (of_rank[r] * ranks) for r, n in enumerate(step)] for step in targets]
    for fault, weights in (("mean-of-means", alike), ("rank-mean-of-means", by_rank)):
        if not _same(weights, due):  # of equal counts it is no mistake
            yield Signature((fault,), weights)
    yield from _short_windows(counts, due)
    for fault, divisors in (("targets-counted-before-shift", counts.labels), ("padding-counted", counts.positions)):
        if divisors == counts.targets or (fault == "padding-counted" and divisors == counts.labels):
            continue  # nothing is counted that should not be
        total = max(_sum(divisors), 1)
        yield Signature((fault,), [[n / total for n in step] for step in targets])
        own = [
            [n / (max(divisors[k][r], 1) * steps * ranks) for r, n in enumerate(step)] for k, step in enumerate(targets)
        ]
        yield Signature((fault,), own)


def _short_windows(counts: Counts, due: Matrix) -> Iterator[Signature]:
    """Divided by what a full window would hold."""
    held, rows = _sum(counts.samples), _sum(counts.rows)
    if not 0 < held < rows:
        return
    steps, ranks = len(due), len(due[0])
    in_use = [[bool(samples) for samples in step] for step in counts.samples]
    for share in {held / rows, sum(map(sum, in_use)) / (steps * ranks), sum(map(any, in_use)) / steps} - {1.0}:
        yield Signature(("short-window-full-divisor",), _scaled(due, share))


def _scales(steps: int, ranks: int) -> list[tuple[tuple[str, ...], float]]:
    """Faults and the factor that they make together; none where two of them undo each other."""
    by_steps = [((), 1.0), (("loss-not-scaled",), float(steps)), (("loss-scaled-twice",), 1 / steps)]
    by_ranks = [((), 1.0), (("ranks-summed",), float(ranks)), (("ranks-averaged-twice",), 1 / ranks)]
    return [
        ((*of_steps, *of_ranks), step_factor * rank_factor)
        for of_steps, step_factor in (by_steps if steps > 1 else by_steps[:1])
        for of_ranks, rank_factor in (by_ranks if ranks > 1 else by_ranks[:1])
        if not (of_steps or of_ranks) or not math.isclose(step_factor * rank_factor, 1.0)
    ]


def _scaled(weights: Matrix, scale: float) -> Matrix:
    return [[weight * scale for weight in step] for step in weights]


def _same(one: Matrix, other: Matrix) -> bool:
    pairs = [(a, b) for row, beside in zip(one, other, strict=True) for a, b in zip(row, beside, strict=True)]
    return all(math.isclose(a, b, rel_tol=1e-9) for a, b in pairs)


def _sum(counts: list[list[int]]) -> int:
    return sum(map(sum, counts))
