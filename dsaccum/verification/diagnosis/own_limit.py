"""Clipping at the wrong place with a limit of its own, which is not in the JSON: it is solved for.

Where a clip acts last on a buffer, the buffer's norm afterwards is the limit. So the norms of the partial sums, with
the weights that were recovered, are the only candidates. One is believed where it predicts every step, wrong and right,
and where at least two clips act: one alone fits any limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dsaccum.verification.comparison.evidence import CaseEvidence, StepEvidence
from dsaccum.verification.comparison.gradient_check import GradientCheck
from dsaccum.verification.diagnosis.named import Named
from dsaccum.verification.diagnosis.signatures import Matrix, clipped_before_reduction, clipped_every_micro_step

Fits = Callable[[GradientCheck, StepEvidence, Matrix], bool]
MOST_MICRO_BATCHES = 64
"""Partial sums of more are not gone through."""
REFINEMENTS = 3
ACTS = 1e-4
"""A weight that is less by this share was clipped."""


def clipped_with_own_limit(evidence: CaseEvidence, steps: list[StepEvidence], fits: Fits) -> list[Named]:
    """Named where one limit makes all steps' weights what they are."""
    first, batch = steps[0], evidence.case.batch
    check = first.gradients[0]
    if (
        check is None
        or batch.accumulation_steps == 1
        or batch.accumulation_steps * batch.world_size > MOST_MICRO_BATCHES
    ):
        return []
    right = [step for step in evidence.steps if step.gradient_right and step.judged]
    for way in range(4 if batch.world_size > 1 else 2):
        for limit in _limits(check, first, way):
            each = [(s, c, _predicted(c, s, limit, way)) for s in (*steps, *right) for c in s.judged]
            if not all(fits(check, step, weights) for step, check, weights in each):
                continue
            acting = [_acting(weights, step.truth.due) for step, _, weights in each]
            if sum(acts for acts, _ in acting) >= 2 and any(uneven for _, uneven in acting):
                identifier = "clipped-before-reduction" if way == 3 else "clipped-every-micro-step"
                asked = evidence.case.gradient_clipping
                shown = {"step": first.step, "limit": limit, "asked_limit": asked, "expected": first.truth.due}
                shown["recovered"] = check.recovered.weights
                return [Named((identifier,), shown, f"to a norm of {limit:.4g}, and the JSON's limit is {asked:g}")]
    return []


def _predicted(check: GradientCheck, step: StepEvidence, limit: float, way: int) -> Matrix:
    if way == 3:
        return clipped_before_reduction(check.factors, step.truth.due, limit)
    return list(clipped_every_micro_step(check.factors, step.truth.due, limit))[way]


def _limits(check: GradientCheck, step: StepEvidence, way: int) -> Iterator[float]:
    """Norms of what ranks, or all together, had after each micro-step; each refined by what it predicts."""
    weights = [weight or 0.0 for weight in check.recovered.weights]
    ranks = len(step.truth.due[0])
    for last in range(len(step.truth.due), 0, -1):
        for rank in range(ranks):
            own = [w * ranks if i % ranks == rank and i // ranks < last else 0.0 for i, w in enumerate(weights)]
            yield _refined(check, step, check.factors.norm(own), way)
    if ranks > 1:
        yield _refined(check, step, check.factors.norm(weights), way)


def _refined(check: GradientCheck, step: StepEvidence, limit: float, way: int) -> float:
    """What is clipped is in proportion to the limit, but for the 1e-6 beside the norm that it is divided by."""
    due = step.truth.due_in_order
    for _ in range(REFINEMENTS):
        predicted = [weight for row in _predicted(check, step, limit, way) for weight in row]
        clipped = [i for i, weight in enumerate(predicted) if weight < due[i] * (1 - ACTS)]
        found = sum(check.recovered.weights[i] or 0.0 for i in clipped)
        if not clipped or not found > 0:
            return limit
        limit *= found / sum(predicted[i] for i in clipped)
    return limit


def _acting(weights: Matrix, due: Matrix) -> tuple[int, bool]:
    """How many clips made these weights of what is due, and whether not all weights were made less alike."""
    shares = [
        [row[rank] / wanted[rank] for row, wanted in zip(weights, due, strict=True) if wanted[rank]]
        for rank in range(len(due[0]))
    ]
    acts = sum(
        sum(later > earlier * (1 + ACTS) for earlier, later in zip(column, [*column[1:], 1.0], strict=True))
        for column in shares
    )
    every = [share for column in shares for share in column]
    return acts, bool(every) and max(every) > min(every) * (1 + ACTS)
