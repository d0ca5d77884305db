"""What a script may put into a gradient past the module's outputs, or take out of it, without any mistake.

Where no weights of the micro-batches account for the gradient, it is looked at as if they had been this, too:

    a term of the parameters    G = sum_i v_i g_i + c p, p the parameters as they were: an L2 penalty in the loss
    a mask                      G = sum_i v_i g_i where G is not exactly 0: rows of an embedding that are to stay

Either is taken only where it accounts for every tensor to within rounding. Nothing is proven right by it, for whether
the term is divided as it should be can't be seen; what the weights then say is judged as ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from dsaccum.verification.comparison.factors import Factors
from dsaccum.verification.comparison.sketch import GradientSketch
from dsaccum.verification.comparison.weights import recover_per_tensor, recover_robustly
from dsaccum.watch.judge import Judged, judge_as_run
from dsaccum.watch.window import RankWindow, Vectors, WatchedWindow


def judge(window: WatchedWindow) -> Judged:
    """Compare.

    Raises:
        ValueError: the ranks made different numbers of micro-steps, or none.
    """
    judged = judge_as_run(window)
    if window.facts.zero_stage is not None or all(check.passed for check in judged.way):
        return judged
    for seen_as in (_masked, _with_parameters):
        for other, reason in seen_as(judged):
            again = judge_as_run(other)
            if all(check.explained and not check.off for check in again.way):
                return replace(again, past_outputs=reason)
    return judged


def _masked(judged: Judged) -> Iterator[tuple[WatchedWindow, str]]:
    """Micro-batches without the elements that are exactly 0 in the gradient of every rank."""
    window = judged.window
    off = {tensor.name for check in judged.way for tensor in check.off}
    masks = {name: mask for name in sorted(off) if (mask := _mask(judged, name)) is not None}
    if not masks or masks.keys() != off:
        return
    first = next(iter(masks))
    kept = masks[first]
    reason = (
        f"{int((~kept).sum()):,} of {kept.numel():,} elements of {first} are exactly 0, and the others what is due: "
        "masked by the script, as it seems"
    )
    yield _changed(window, lambda name, tensor: tensor * masks[name] if name in masks else tensor), reason


def _mask(judged: Judged, name: str) -> Tensor | None:
    """The elements that were kept; None where it is none, or where weights of micro-batches account for the tensor."""
    ranks, steps = judged.window.ranks, judged.window.micro_steps * len(judged.window.ranks)
    whole = {tensor.numel() for rank in ranks for tensor in (rank.gradient[name], *(c[name] for c in rank.columns))}
    masters = _parameters(judged)
    if masters is None or whole != {masters[name].numel()}:
        return None
    due = torch.stack([column[name].abs() for rank in ranks for column in rank.columns]).sum(dim=0) > 0
    kept = torch.stack([rank.gradient[name] != 0 for rank in ranks]).any(dim=0)
    if int((due & kept).sum()) < 2 * steps or bool((due & kept).sum() == due.sum()):
        return None
    for check in judged.way:
        residual = recover_per_tensor(check.factors)[name].residual
        if residual is not None and residual <= check.residual_bound:
            return None
    return kept | ~due


def _with_parameters(judged: Judged) -> Iterator[tuple[WatchedWindow, str]]:
    """Micro-batches that share a term along the parameters: of all, of matrices, of those that are off."""
    parameters = _parameters(judged)
    if parameters is None:
        return
    off = {tensor.name for check in judged.way for tensor in check.off}
    matrices = {name for name, tensor in parameters.items() if tensor.dim() > 1}
    sketch = _sketch_like(judged.window.ranks[0].gradient, parameters)
    for names in dict.fromkeys(map(frozenset, (parameters.keys(), matrices, off))):
        term = sketch({name: parameters[name] if name in names else None for name in parameters})
        found = [_coefficient(rank, judged, term) for rank in judged.window.ranks]
        c = found[0]
        if not c or any(other is None or abs(other / c - 1) > 1e-3 for other in found):
            continue
        each = c / judged.window.micro_steps / (judged.factor or 1.0)
        share = {name: each * tensor.double() for name, tensor in term.items()}
        reason = (
            "a term of the loss does not go through the module's outputs: the gradient holds "
            f"{c:.3g} times the parameters themselves, as an L2 penalty gives it"
        )
        yield _changed(judged.window, partial(_plus, share)), reason


def _plus(share: Vectors, name: str, tensor: Tensor) -> Tensor:
    return tensor.double() + share[name]


def _coefficient(rank: RankWindow, judged: Judged, term: Vectors) -> float | None:
    return recover_robustly(Factors(rank.gradient, judged.way_truth.columns, [term])).extra[0]


def _sketch_like(gradient: Vectors, parameters: Mapping[str, Tensor]) -> GradientSketch:
    whole = all(gradient[name].numel() == tensor.numel() for name, tensor in parameters.items())
    shapes = {name: tensor.shape for name, tensor in parameters.items()}
    return GradientSketch(shapes, whole_limit=sum(map(math.prod, shapes.values())) if whole else 0)


def _parameters(judged: Judged) -> dict[str, Tensor] | None:
    """Those that are trained, as the window had them."""
    step = judged.window.ranks[0].step
    if step is None or step.before is None or step.before.masters.keys() != judged.window.ranks[0].gradient.keys():
        return None
    return dict(step.before.masters)


def _changed(window: WatchedWindow, change: Callable[[str, Tensor], Tensor]) -> WatchedWindow:
    """With other gradients of the micro-batches."""

    def all_of(columns: list[Vectors]) -> list[Vectors]:
        return [{name: change(name, tensor) for name, tensor in column.items()} for column in columns]

    ranks = [replace(rank, columns=all_of(rank.columns), truths=all_of(rank.truths)) for rank in window.ranks]
    return replace(window, ranks=ranks)
