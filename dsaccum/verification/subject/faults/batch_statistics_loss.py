"""A loss that is no sum over samples: what ``loss.factory`` must not be, and what ``loss-not-additive`` asks for.

Next-token cross entropy, and the square of each logit's mean over the micro-batch, as balancing terms have it: the
mean's square over a big batch is not the mean of squares over its parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class BatchStatisticsLoss:
    """Cross entropy with a term in which samples of a micro-batch meet."""

    def count(self, micro_batch: Mapping[str, Tensor]) -> int:
        """Target tokens after the shift."""
        return int((micro_batch["labels"][:, 1:] != -100).sum())

    def sum(self, outputs: Any, micro_batch: Mapping[str, Tensor]) -> Tensor:
        """Token losses, and the term once for each target."""
        logits = outputs.logits
        if logits.dtype != torch.float64:
            logits = logits.float()
        tokens = F.cross_entropy(logits[:, :-1].flatten(0, 1), micro_batch["labels"][:, 1:].flatten(), reduction="sum")
        return tokens + self.count(micro_batch) * logits.mean((0, 1)).square().sum()


def build() -> BatchStatisticsLoss:
    """For ``loss.factory``."""
    return BatchStatisticsLoss()
