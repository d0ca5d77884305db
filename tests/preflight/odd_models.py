"""``model.factory`` of test_odd_models.py: models that train, and that a verification has trouble with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Bigram(nn.Module):
    """Predicts the next byte from this one."""

    def __init__(self, vocabulary_size: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary_size, 16), nn.Linear(16, vocabulary_size)

    def hidden(self, ids: Tensor) -> Tensor:
        return self.embedding(ids)

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=self.head(self.hidden(input_ids)))


class Float32Inside(Bigram):
    def hidden(self, ids: Tensor) -> Tensor:
        mask = torch.ones(16, 16, device=ids.device)  # float32, whatever the parameters are
        return self.embedding(ids) @ mask


class FourRows(Bigram):
    def hidden(self, ids: Tensor) -> Tensor:
        assert len(ids) != 2 or not torch.is_grad_enabled(), "no two rows"
        return self.embedding(ids)


class Drops(Bigram):
    def hidden(self, ids: Tensor) -> Tensor:
        return F.dropout(self.embedding(ids), 0.1, self.training)


class Unused(Bigram):
    def __init__(self, vocabulary_size: int) -> None:
        super().__init__(vocabulary_size)
        self.unused = nn.Parameter(torch.ones(8))


class Normalised(Bigram):
    def __init__(self, vocabulary_size: int) -> None:
        super().__init__(vocabulary_size)
        self.norm = nn.BatchNorm1d(16)

    def hidden(self, ids: Tensor) -> Tensor:
        return self.norm(self.embedding(ids).transpose(1, 2)).transpose(1, 2)


def float32_inside(vocabulary_size: int, sequence_length: int) -> nn.Module:
    return Float32Inside(vocabulary_size)


def four_rows(vocabulary_size: int, sequence_length: int) -> nn.Module:
    return FourRows(vocabulary_size)


def drops(vocabulary_size: int, sequence_length: int) -> nn.Module:
    return Drops(vocabulary_size)


def unused(vocabulary_size: int, sequence_length: int) -> nn.Module:
    return Unused(vocabulary_size)


def normalised(vocabulary_size: int, sequence_length: int) -> nn.Module:
    return Normalised(vocabulary_size)
