"""Causes of single tensors that are wrong while the others are right: each is explained by itself.

With G_t one rank's gradient of tensor t, g_i,t its micro-batches' and w_i their due weights, L_t what the window before
left on the same rank, the explanations are tried in this order:

    not reduced     G_t = s (sum of w_i g_i,t over the rank's own micro-batches) on every rank, s = 1 or W
    left over       G_t = sum of w_i g_i,t + c L_t
    micro-steps     G_t = sum of w_i g_i,t over some of the micro-steps
    a share         G_t = c (sum of w_i g_i,t); c = 0: it is lost

One holds where it leaves over no more than the tensor's own bound, on every rank and in every step in which it is off.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dsaccum.verification.comparison.evidence import CaseEvidence, StepEvidence
from dsaccum.verification.comparison.factors import Factors
from dsaccum.verification.comparison.gradient_check import FAINT, GradientCheck
from dsaccum.verification.diagnosis.named import Named

ABOUT_RIGHT = 0.05
"""A tensor's ratio this close to 1 tells nothing: single elements are wrong, or something was added."""
NO_SHARE = 0.01
"""A share this close to 1 is no share: something small is wrong all over."""
FEWEST_ELEMENTS = 4
"""A factor fits fewer too easily."""

_OVERWRITTEN = (
    "look for code that clears or overwrites the gradient of the parameters named here inside the window: "
    "zero_grad(), .grad = None, or a buffer that is written to where it should be added to"
)
_SHARED = (
    "look for what multiplies the gradient of the parameters named here: a hook, a scale of one parameter group, "
    "or a detach() on one of several uses"
)
_WRONG = (
    "the gradient is there and wrong, not lost: look for what else reaches the parameters named here (a hook, code "
    "that writes to .grad, a second loss), and for a use of theirs that is cut off (a detach() of tied weights)"
)
_LEFT_OUT = (
    "look for what leaves the parameters named here out of the all-reduce: a bucket or a list that ends too early, a "
    "hand-made reduction, or a parameter that is marked as not to be reduced"
)
_KEPT = (
    "clear the gradients of the parameters named here after every optimizer step, as those of the others are: look "
    "for a zero_grad() that skips them, or for a list of parameters without them"
)


@dataclass(frozen=True)
class _Explained:
    """What one tensor's gradient is instead."""

    kind: str
    ratio: float | None
    shown: dict[str, Any] = field(default_factory=dict)


def single_tensors(evidence: CaseEvidence, steps: Sequence[StepEvidence], *, explained_only: bool) -> list[Named]:
    """A few tensors are off in every wrong step; each is explained, or else the weights of the others are right.

    Args:
        evidence: of the case.
        steps: the wrong ones.
        explained_only: nothing is said where a tensor is wrong in no way that is known.
    """
    wrong = [(step, rank, check) for step in steps for rank, check in enumerate(step.gradients) if check is not None]
    wrong = [(step, rank, check) for step, rank, check in wrong if not check.passed]
    if not wrong or any(not check.off or len(check.off) > len(check.tensors) / 2 for _, _, check in wrong):
        return []
    names = list(dict.fromkeys(tensor.name for _, _, check in wrong for tensor in check.off))
    explained = {name: _explain(evidence, steps, name) for name in names}
    unexplained = any(each.kind == "wrong" for each in explained.values())
    if unexplained and (explained_only or not all(check.weights_right for _, _, check in wrong)):
        return []
    return [_named(kind, explained) for kind in dict.fromkeys(each.kind for each in explained.values())]


def lost(off: dict[str, float | None]) -> Named:
    """Tensors that are off beside wrong weights, with their ratios to what those explain."""
    kinds = {name: "lost" if ratio is not None and abs(ratio) < NO_SHARE else "wrong" for name, ratio in off.items()}
    kind = "lost" if set(kinds.values()) == {"lost"} else "wrong"
    return _named(kind, {name: _Explained(kind, ratio) for name, ratio in off.items()})


def _named(kind: str, explained: dict[str, _Explained]) -> Named:
    chosen = {name: each for name, each in explained.items() if each.kind == kind}
    first, one = next(iter(chosen.items()))
    shown: dict[str, Any] = {"parameters": {name: each.ratio for name, each in list(chosen.items())[:20]}, **one.shown}
    where = f"{first} and {len(chosen) - 1} more" if len(chosen) > 1 else first
    if kind == "not reduced":
        return Named(("ranks-not-reduced",), shown, f"of {where}; all others are reduced", fix=_LEFT_OUT)
    if kind == "left over":
        held = f"{where}: step {shown['step']} holds {shown['share_of_the_window_before']:.3g} times"
        return Named(("stale-gradients",), shown, f"{held} what step {shown['step'] - 1} left there", fix=_KEPT)
    lost = ("parameter-gradient-lost",)
    if kind == "micro-steps":
        missing = ", ".join(map(str, shown["missing_micro_steps"]))
        plural = "s" if len(shown["missing_micro_steps"]) > 1 else ""
        rank = f" of rank {shown['rank']}" if "rank" in shown else ""
        return Named(lost, shown, f"{where}: micro-step{plural} {missing}{rank} missing", fix=_OVERWRITTEN)
    if kind == "lost":
        return Named(lost, shown, f"{where}: nothing of what is due")
    size = "" if one.ratio is None else f"{one.ratio:.3g} of what is due"
    if kind == "share":
        return Named(lost, shown, f"{where}: {size}", fix=_SHARED)
    if one.ratio is not None and abs(one.ratio - 1) < ABOUT_RIGHT:
        size = "about as large as is due, and another"
    size = f", {size}" if size else ""
    return Named(lost, shown, f"{where}{size}: no share of it, no micro-step and no left-over explains it", fix=_WRONG)


class _Sight:
    """One tensor on one rank in one step: what is left over of it under a hypothesis, relative to its size."""

    def __init__(self, step: StepEvidence, rank: int, check: GradientCheck, name: str) -> None:
        self.step, self.rank, self.name = step, rank, name
        self.bound, self.ratio = next((t.bound, t.ratio) for t in check.tensors if t.name == name)
        self.due, self.ranks = step.truth.due_in_order, len(step.truth.due[0])
        self._triangle = check.factors.triangles[check.factors.names.index(name)]
        self.elements = check.factors.elements[check.factors.names.index(name)]
        self._least = max(step.truth.sizes.get(name, 0.0), FAINT * math.hypot(*step.truth.sizes.values()))

    def fits(self, weights: Sequence[float]) -> bool:
        """These weights of the micro-batches account for the tensor."""
        c = torch.tensor(weights, dtype=torch.float64)
        vectors, target = self._triangle[:, :-1], self._triangle[:, -1]
        used = c.nonzero().flatten()
        size = max(float(vectors[:, used].norm(dim=0) @ c[used].abs()), self._least)
        return float((target - vectors[:, used] @ c[used]).norm()) <= self.bound * size

    def own(self, scale: float) -> list[float]:
        """The due weights of this rank's micro-batches, times ``scale``."""
        return [w * scale if i % self.ranks == self.rank else 0.0 for i, w in enumerate(self.due)]

    def share(self) -> float | None:
        """The c with which c times what is due accounts for it; None where none does."""
        if self.elements < FEWEST_ELEMENTS or self.ratio is None or abs(self.ratio - 1) < NO_SHARE:
            return None
        return self.ratio if self.fits([self.ratio * weight for weight in self.due]) else None

    def left_over(self, before: StepEvidence | None) -> float | None:
        """The c with which what is due and c times the window before's tensor account for it; None where none does."""
        if before is None or len(before.vectors) <= self.rank or self.elements < FEWEST_ELEMENTS:
            return None
        parts = [self.step.vectors[self.rank], before.vectors[self.rank], *self.step.truth.columns]
        if any(self.name not in part for part in parts):
            return None
        found, earlier, *columns = ({self.name: part[self.name]} for part in parts)
        triangle = Factors(found, columns, [earlier]).triangles[0]
        rest = triangle[:, -1] - triangle[:, : len(columns)] @ torch.tensor(self.due, dtype=torch.float64)
        stale = triangle[:, len(columns)]
        if not float(stale @ stale):
            return None
        share = float(rest @ stale) / float(stale @ stale)
        size = self._least + abs(share) * float(stale.norm())
        explained = float((rest - share * stale).norm()) <= self.bound * size
        return share if explained and abs(share) * float(stale.norm()) > 10 * self.bound * size else None

    def missing(self) -> list[tuple[int, int | None]]:
        """Micro-steps that add nothing to it, the others all that is due, and whose: a rank, or None for all."""
        for places in self._may_be_missing():
            left = [
                0.0 if any(i // self.ranks == k and rank in (None, i % self.ranks) for k, rank in places) else weight
                for i, weight in enumerate(self.due)
            ]
            if any(left) and left != self.due and self.fits(left):
                return [(k + 1, rank) for k, rank in places]
        return []

    def _may_be_missing(self) -> Iterator[list[tuple[int, int | None]]]:
        steps = len(self.due) // self.ranks
        for rank in (None, *(range(self.ranks) if self.ranks > 1 else ())):
            yield from ([(k, rank)] for k in range(steps))
            yield from ([(k, rank) for k in range(first)] for first in range(2, steps))  # overwritten
            yield from ([(k, rank) for k in range(first, steps)] for first in range(1, steps - 1))  # never added
            if rank is not None:
                yield [(k, rank) for k in range(steps)]


def _explain(evidence: CaseEvidence, steps: Sequence[StepEvidence], name: str) -> _Explained:
    seen = []
    for step in steps:
        checks = [each for each in step.judged if any(tensor.name == name for tensor in each.off)]
        if checks:
            ranks = [(rank, check) for rank, check in enumerate(step.gradients) if check is not None]
            seen.append([_Sight(step, rank, check, name) for rank, check in ranks])
    every = [sight for sights in seen for sight in sights]
    first = every[0]
    for scale in (1.0, float(first.ranks)) if first.ranks > 1 else ():
        whole = all(len(sights) == first.ranks for sights in seen)
        if whole and all(sight.fits(sight.own(scale)) for sight in every):
            shown = {"step": first.step.step, "each_rank_keeps": scale / first.ranks, "elements": first.elements}
            return _Explained("not reduced", first.ratio, shown)
    by_number = {step.step: step for step in evidence.steps}
    left = [sight.left_over(by_number.get(sight.step.step - 1)) for sight in every]
    if left[0] is not None and all(each is not None for each in left):
        shown = {"step": first.step.step, "share_of_the_window_before": left[0]}
        return _Explained("left over", first.ratio, shown)
    missing = [sight.missing() for sight in every]
    if missing[0] and all(each == missing[0] for each in missing):
        rank = missing[0][0][1]
        found: dict[str, Any] = {"step": first.step.step, "missing_micro_steps": [k for k, _ in missing[0]]}
        return _Explained("micro-steps", first.ratio, found if rank is None else {**found, "rank": rank})
    shares = [sight.share() for sight in every]
    if shares[0] is not None and all(each is not None for each in shares):
        return _Explained("lost" if all(abs(each or 0.0) < NO_SHARE for each in shares) else "share", shares[0])
    return _Explained("wrong", first.ratio)
