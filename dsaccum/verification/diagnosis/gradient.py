"""Causes of a wrong gradient, from the weights of the micro-batches and from what no weighting explains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from dsaccum.verification.comparison.evidence import CaseEvidence, StepEvidence
from dsaccum.verification.comparison.factors import Factors
from dsaccum.verification.comparison.gradient_check import GradientCheck
from dsaccum.verification.comparison.weights import judge_tensors, recover_robustly
from dsaccum.verification.diagnosis.named import Named
from dsaccum.verification.diagnosis.own_limit import clipped_with_own_limit
from dsaccum.verification.diagnosis.precision import loss_scale_causes, low_precision_causes
from dsaccum.verification.diagnosis.signatures import (
    Matrix,
    clipped_before_reduction,
    clipped_every_micro_step,
    dropped,
    signatures,
)
from dsaccum.verification.diagnosis.tensors import lost, single_tensors

Explanation = frozenset[str]
"""Faults that together make a window's weights what they are."""
_DROPPED, _ONLY_LAST = frozenset({"micro-batch-dropped"}), frozenset({"only-last-micro-batch"})
_FULL_DIVISOR, _MEAN_OF_MEANS = frozenset({"short-window-full-divisor"}), frozenset({"mean-of-means"})


def gradient_causes(evidence: CaseEvidence) -> list[Named]:
    """What explains the wrong gradients of all steps; empty where nothing does."""
    wrong = [step for step in evidence.steps if not step.gradient_right and step.gradients]
    if not wrong:
        return []
    apart = next((step.step for step in evidence.steps if step.replicas_differing), None)
    if apart is not None and wrong[0].step <= apart:
        wrong = [step for step in wrong if step.step <= apart]  # later ones belong to other parameters on each rank
    named = loss_scale_causes(wrong) or low_precision_causes(evidence, wrong)
    named = named or single_tensors(evidence, wrong, explained_only=True)
    if named:
        return named
    weighed = [step for step in wrong if not all(each.weights_right for each in step.judged)]
    if weighed:
        if not all(each.explained for step in weighed for each in step.judged):
            named += _stale(evidence, weighed)
        named = named or _by_weights(evidence, weighed) or clipped_with_own_limit(evidence, weighed, _fits)
        named += _tensors_aside(weighed) if named else []
    elif not all(each.explained for step in wrong for each in step.judged):
        named += _stale(evidence, wrong)
    named += single_tensors(evidence, wrong, explained_only=False)
    if not named and evidence.draws:
        return [Named(("randomness-active",), {"forward_twice_differs_by": evidence.draws})]
    return named


def _by_weights(evidence: CaseEvidence, steps: list[StepEvidence]) -> list[Named]:
    """The explanations that fit every wrong step, and no right one otherwise; of those, the ones with fewest faults."""
    common: set[Explanation] | None = None
    for step in steps:
        fitting = _explanations(evidence, step)
        common = fitting if common is None else common & fitting
    right = [step for step in evidence.steps if step.gradient_right and step.judged]
    common = {each for each in common or () if not any(_contradicted(evidence, step, each) for step in right)}
    if not common:
        return []
    fewest = min(map(len, common))
    chosen = sorted((each for each in common if len(each) == fewest), key=sorted)
    if _FULL_DIVISOR in chosen and _MEAN_OF_MEANS in chosen:
        chosen.remove(_MEAN_OF_MEANS)  # micro-batches of equal counts, and none of them filled up: it is no mistake
    shown = _weights_shown(steps[0])
    if fewest > 1 and len(chosen) == 1 and not chosen[0] > _ONLY_LAST:  # several faults at once, and no other reading
        return [Named((fault,), shown) for fault in sorted(chosen[0])]
    # Where one micro-step is left, all else rests on one number, which other mistakes make, too: two backward calls of
    # half the loss on two ranks look like an average over ranks taken twice.
    return [Named(tuple(sorted({fault for each in chosen for fault in each})), shown)]


def _explanations(evidence: CaseEvidence, step: StepEvidence) -> set[Explanation]:
    """All that predict what every rank got."""
    per_rank = []
    for rank, check in enumerate(step.gradients):
        if check is None:
            continue
        fitting = set()
        for faults, weights in _predictions(evidence, step, rank, check):
            if _fits(check, step, weights):
                fitting.add(faults)
            elif missing := _missing(check, step, weights, fewest_others=2 if faults else 1):
                fitting.add(faults | (_ONLY_LAST if missing == _all_but_the_last(step) else _DROPPED))
        per_rank.append(fitting)
    return set.intersection(*per_rank) - {frozenset()}


def _missing(check: GradientCheck, step: StepEvidence, predicted: Matrix, fewest_others: int) -> list[int]:
    """Micro-batches that add nothing, where all others, at least so many, weigh what is predicted; else empty."""
    flat = [weight for row in predicted for weight in row]
    if not all(weight for weight, due in zip(flat, step.truth.due_in_order, strict=True) if due):
        return []  # it is predicted that some add nothing
    missing = dropped(check.recovered.weights, flat, check.tolerance)
    told = [weight for weight, p in zip(check.recovered.weights, flat, strict=True) if p and weight is not None]
    return missing if len(told) - len(missing) >= fewest_others else []


def _all_but_the_last(step: StepEvidence) -> list[int]:
    """Of the micro-batches that are due anything, those before the last micro-step."""
    due = step.truth.due_in_order
    return [index for index, weight in enumerate(due[: -len(step.truth.due[0])]) if weight]


def _predictions(
    evidence: CaseEvidence, step: StepEvidence, rank: int, check: GradientCheck
) -> Iterator[tuple[Explanation, Matrix]]:
    """What each explanation would make of this window's weights on this rank; some in several ways."""
    for signature in signatures(step.counts, rank):
        yield frozenset(signature.faults), signature.weights
    if (limit := evidence.case.gradient_clipping) > 0 and evidence.case.batch.accumulation_steps > 1:
        for weights in clipped_every_micro_step(check.factors, step.truth.due, limit):
            yield frozenset({"clipped-every-micro-step"}), weights
        yield frozenset({"clipped-before-reduction"}), clipped_before_reduction(check.factors, step.truth.due, limit)


def _contradicted(evidence: CaseEvidence, step: StepEvidence, explanation: Explanation) -> bool:
    """It predicts this right step, too, and predicts it to be wrong. A micro-batch may be dropped in one step only."""
    always = explanation - _DROPPED
    for rank, check in enumerate(step.gradients):
        if check is None:
            continue
        predicted = [weights for faults, weights in _predictions(evidence, step, rank, check) if faults == always]
        if predicted and not any(_fits(check, step, weights) for weights in predicted):
            return True
    return False


def _fits(check: GradientCheck, step: StepEvidence, predicted: Matrix) -> bool:
    """Every weight that could be told is the predicted one, to the tolerance of weights.

    That is relative to what the whole gradient is predicted to be: where all weights are small, rounding is, too.
    """
    flat = [weight for row in predicted for weight in row]
    due = step.truth.due_in_order
    share = sum(flat) / sum(due) if sum(due) else 1.0
    known = [(w, p, d) for w, p, d in zip(check.recovered.weights, flat, due, strict=True) if w is not None]
    return bool(known) and all(abs(w - p) <= 2 * check.tolerance * (max(p, d * share) if p else d) for w, p, d in known)


def _stale(evidence: CaseEvidence, steps: list[StepEvidence]) -> list[Named]:
    """With the gradient of the window before as one more column, nothing is left over, and it has a coefficient."""
    by_number = {step.step: step for step in evidence.steps}
    for step in steps:
        before = by_number.get(step.step - 1)
        if before is None or not before.vectors:
            continue
        for rank, check in enumerate(step.gradients):
            if check is None:
                continue
            factors = Factors(step.vectors[rank], step.truth.columns, [before.vectors[rank]])
            found = recover_robustly(factors)
            share = found.extra[0] if found.extra else None
            explained = found.residual is not None and found.residual <= check.residual_bound
            if explained and share is not None and abs(share) > 10 * check.tolerance:
                shown = {"step": step.step, "rank": rank, "share_of_the_window_before": share}
                return [
                    Named(
                        ("stale-gradients",),
                        shown,
                        f"step {step.step} holds {share:.3g} times the gradient of step {before.step}",
                    )
                ]
    return []


def _tensors_aside(steps: Iterable[StepEvidence]) -> list[Named]:
    """The same beside wrong weights: tensors that no weights explain together with the others."""
    off: dict[str, float | None] = {}
    for step in steps:
        for check in step.judged:
            bounds = {tensor.name: tensor.bound for tensor in check.tensors}
            fits = judge_tensors(check.factors, check.recovered.weights)
            aside = {name: fits[name] for name in check.recovered.outliers if fits[name].residual > bounds[name]}
            if not aside:
                return []
            off |= {name: fit.ratio for name, fit in aside.items()}
    return [lost(off)] if off else []


def _weights_shown(step: StepEvidence) -> dict[str, Any]:
    return {
        "step": step.step,
        "expected": step.truth.due,
        "recovered_by_rank": [check.recovered.weights for check in step.judged],
    }
