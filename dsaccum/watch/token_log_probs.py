"""The weight of every target token where a model gives no logits, but its targets' log-probabilities: TRL's, for one.

The gradient of -s log p(y) at log p(y) is -s. That an output named ``log_probs`` holds what its name says is believed;
a position whose value is exactly 0 has no target.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dsaccum.watch.tokens import TokenReading

NAME = "log_probs"


def read_log_probs(values: Tensor, gradient: Tensor, keywords: Mapping[str, Any]) -> TokenReading:
    """Read one forward's tokens.

    Args:
        values: [rows, T], or [rows, T - 1] where they are the next tokens' of T inputs.
        gradient: that reached them, of the same shape.
        keywords: what the forward was given: ``labels`` and ``attention_mask`` are looked at.
    """
    weights = -gradient.double().cpu()
    counts = (values.cpu() != 0) & (weights != 0)
    if bool((weights[counts] < 0).any()):
        return TokenReading(reason="the loss lowers some tokens' probabilities: it is no plain cross entropy")
    labels, mask = (_aligned(keywords.get(name), values.shape) for name in ("labels", "attention_mask"))
    padding = mask == 0 if mask is not None else torch.zeros_like(counts)
    real = counts & ~padding
    asked = (labels != -100) & ~padding if labels is not None else real
    given = keywords.get("labels")
    return TokenReading(
        weights=weights[real].tolist(),
        padding=weights[counts & padding].tolist(),
        due=int(asked.sum()),
        before_shift=int((given != -100).sum()) if isinstance(given, Tensor) else int(real.sum()) + len(values),
        positions=counts.numel(),
        attended=_attended(keywords.get("attention_mask")),
        rows=int(asked.any(dim=-1).sum()),
        all_rows=len(values),
        tolerance=torch.finfo(gradient.dtype).eps / 2,
        kind="log-probabilities",
        unweighted=int((asked & ~counts).sum()),
        uncalled=int((real & ~asked).sum()),
        shifted=True,
    )


def _aligned(field: Any, shape: torch.Size) -> Tensor | None:
    """What belongs to each value: of the next position where there is one more of them."""
    if not isinstance(field, Tensor) or field.dim() != 2 or field.shape[0] != shape[0]:
        return None
    moved = field[:, 1:] if field.shape[1] == shape[1] + 1 else field
    return moved.cpu() if moved.shape == shape else None


def _attended(mask: Any) -> tuple[int, int]:
    return (int(mask.sum()), int(mask[:, 1:].sum())) if isinstance(mask, Tensor) and mask.dim() == 2 else (0, 0)
