"""``model.factory`` of tests/verification/test_wrong_names.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class WithUnused(nn.Module):
    """Predicts the next byte from this one; ``unused`` takes no part."""

    def __init__(self, vocabulary_size: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary_size, 16), nn.Linear(16, vocabulary_size)
        self.unused = nn.Parameter(torch.ones(8))

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=self.head(self.embedding(input_ids)))


class WithScalar(WithUnused):
    def __init__(self, vocabulary_size: int) -> None:
        super().__init__(vocabulary_size)
        del self.unused
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=self.scale * self.head(self.embedding(input_ids)))


class WithFrozen(WithUnused):
    def __init__(self, vocabulary_size: int) -> None:
        super().__init__(vocabulary_size)
        del self.unused
        self.embedding.weight.requires_grad_(False)


def frozen(vocabulary_size: int, sequence_length: int) -> nn.Module:
    return WithFrozen(vocabulary_size)


def unused(vocabulary_size: int, sequence_length: int) -> nn.Module:
    return WithUnused(vocabulary_size)


def scalar(vocabulary_size: int, sequence_length: int) -> nn.Module:
    return WithScalar(vocabulary_size)
