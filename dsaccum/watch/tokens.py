"""The target tokens of a micro-batch: which are due, what each weighs, and which count that should not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsaccum.watch.alignment import Alignment, alignment_of
from dsaccum.watch.token_fit import Fitted, fit_tokens
from dsaccum.watch.z_loss import ZReading, z_together


@dataclass(frozen=True)
class TokenReading:
    """One micro-batch's tokens.

    Attributes:
        weights: s of each token that has one and is no padding, [n].
        padding: s of each that predicts padding.
        due: tokens that are due to count: by the labels where the model was given them, else those that have a weight.
        before_shift: labels that count before the causal shift; where they are not known, one more for each row.
        positions: of the batch.
        attended: sum of the attention mask, and without each row's first column; (0, 0) where none was given.
        rows: with a target.
        all_rows: of the batch.
        remainder: the largest part of a token's gradient that is no cross entropy.
        tolerance: what rounding may do to a weight, relative.
        kind: ``cross-entropy``, with ``+label-smoothing``, ``+z-loss``.
        unweighted: due tokens without a weight.
        uncalled: tokens with a weight that no label asks for, padding aside.
        shifted: a label stands one place after its logits.
        z: of the z-loss in it.
        alignments: inputs and targets, to see whether they belong together.
        reason: why nothing was told; then the rest means nothing.
    """

    weights: list[float] = field(default_factory=list)
    padding: list[float] = field(default_factory=list)
    due: int = 0
    before_shift: int = 0
    positions: int = 0
    attended: tuple[int, int] = (0, 0)
    rows: int = 0
    all_rows: int = 0
    remainder: float = 0.0
    tolerance: float = 0.0
    kind: str = "cross-entropy"
    unweighted: int = 0
    uncalled: int = 0
    shifted: bool = False
    z: ZReading = field(default_factory=ZReading)
    alignments: list[Alignment] = field(default_factory=list)
    reason: str | None = None

    @property
    def sum(self) -> float:
        """Over all tokens, padding included."""
        return sum(self.weights) + sum(self.padding)

    @classmethod
    def together(cls, readings: Sequence[TokenReading]) -> TokenReading | None:
        """Of several forwards in one micro-step."""
        if not readings:
            return None
        if broken := next((each for each in readings if each.reason), None):
            return broken
        first = readings[0]
        if len(readings) == 1:
            return first
        return cls(
            weights=[w for each in readings for w in each.weights],
            padding=[w for each in readings for w in each.padding],
            due=sum(each.due for each in readings),
            before_shift=sum(each.before_shift for each in readings),
            positions=sum(each.positions for each in readings),
            attended=(sum(each.attended[0] for each in readings), sum(each.attended[1] for each in readings)),
            rows=sum(each.rows for each in readings),
            all_rows=sum(each.all_rows for each in readings),
            remainder=max(each.remainder for each in readings),
            tolerance=max(each.tolerance for each in readings),
            kind=first.kind,
            unweighted=sum(each.unweighted for each in readings),
            uncalled=sum(each.uncalled for each in readings),
            shifted=first.shifted,
            z=z_together([each.z for each in readings]),
            alignments=[one for each in readings for one in each.alignments],
        )


def read_tokens(
    logits: Tensor, gradient: Tensor, keywords: Mapping[str, Any], arguments: Sequence[Any]
) -> TokenReading:
    """Read one forward's tokens.

    Args:
        logits: [..., V], as the run had them.
        gradient: that reached them, of the same shape.
        keywords: what the forward was given: ``labels``, ``attention_mask`` and ``input_ids`` are looked at.
        arguments: likewise, by position.
    """
    vocabulary = logits.shape[-1]
    flat_z, flat_g = logits.reshape(-1, vocabulary), gradient.reshape(-1, vocabulary)
    tokens = fit_tokens(flat_z, flat_g)
    shape = logits.shape[:-1]
    if tokens.broken is not None:
        return TokenReading(reason=tokens.broken, remainder=tokens.remainder)
    weights, targets = tokens.weights.reshape(shape), tokens.targets.reshape(shape)
    return _counted(weights, targets, keywords, arguments, tokens)


def _counted(
    weights: Tensor, targets: Tensor, keywords: Mapping[str, Any], arguments: Sequence[Any], fitted: Fitted
) -> TokenReading:
    shape = weights.shape
    counts = weights != 0
    labels = _field(keywords.get("labels"), shape)
    inputs = _field(keywords.get("input_ids"), shape)
    if inputs is None:
        inputs = next(
            (f for f in (_field(a, shape) for a in arguments) if f is not None and not f.is_floating_point()), None
        )
    mask = _field(keywords.get("attention_mask"), shape)
    sequences = len(shape) == 2
    shifted = sequences and _is_shifted(labels if labels is not None else inputs, targets, counts)
    padding = _padding(mask, targets, inputs, counts, shifted=bool(shifted)) if sequences else torch.zeros_like(counts)
    asked = None
    before = int(counts.sum())
    if labels is not None:
        asked = _moved(labels != -100, shifted) & ~padding
        before = int((labels != -100).sum())
    elif shifted:
        before = int((counts & ~padding).sum()) + int(counts.any(dim=-1).sum())
    real = counts & ~padding
    due = asked if asked is not None else real
    return TokenReading(
        weights=weights[real].tolist(),
        padding=weights[counts & padding].tolist(),
        due=int(due.sum()),
        before_shift=before,
        positions=weights.numel(),
        attended=(int(mask.sum()), int(mask[:, 1:].sum())) if mask is not None and sequences else (0, 0),
        rows=int(due.any(dim=-1).sum()) if sequences else int(due.sum()),
        all_rows=shape[0] if shape else 1,
        remainder=fitted.remainder,
        tolerance=fitted.tolerance,
        kind=fitted.kind,
        unweighted=int((due & ~counts).sum()),
        uncalled=int((real & ~due).sum()) if asked is not None else 0,
        shifted=bool(shifted),
        z=fitted.z,
        alignments=alignment_of(inputs, targets, real) if sequences else [],
    )


def _is_shifted(source: Tensor | None, targets: Tensor, counts: Tensor) -> bool:
    """Whether targets are what stands one place later, rather than at their own."""
    if source is None or targets.shape[1] < 2:
        return False
    later = counts[:, :-1]
    at_next = int((later & (source[:, 1:] == targets[:, :-1])).sum())
    own = int((counts & (source == targets)).sum())
    return at_next > own


def _padding(mask: Tensor | None, targets: Tensor, inputs: Tensor | None, counts: Tensor, *, shifted: bool) -> Tensor:
    """Positions that predict padding."""
    padding = torch.zeros_like(counts)
    if mask is None:
        return padding
    if not shifted:
        return mask == 0
    padding[:, :-1], padding[:, -1] = mask[:, 1:] == 0, mask[:, -1] == 0
    # The end of a text may be its last target and no input: where nothing within the padding counts, or where it is
    # another token than the padding's, the target after the last token is no padding.
    after_last = padding & (mask != 0)
    if not bool((counts & padding & ~after_last).any()):
        return padding & ~after_last
    if inputs is not None:
        padding[:, :-1] &= ~after_last[:, :-1] | (targets[:, :-1] == inputs[:, 1:])
    return padding


def _moved(asked: Tensor, shifted: bool) -> Tensor:
    if not shifted:
        return asked
    moved = torch.zeros_like(asked)
    moved[:, :-1] = asked[:, 1:]
    return moved


def _field(value: Any, shape: torch.Size) -> Tensor | None:
    return value.detach().cpu() if isinstance(value, Tensor) and value.shape == shape else None
