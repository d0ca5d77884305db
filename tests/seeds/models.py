"""Models and losses of a user's own, for ``model.factory`` and ``loss.factory``: tiny plain torch, one oddity each."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, RANK = 16, 2


class Mixing(nn.Module):
    """Each token is told the mean of all tokens up to it: the cheapest causal layer there is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        position = torch.arange(1, hidden.size(1) + 1, device=hidden.device, dtype=hidden.dtype)
        so_far = hidden.cumsum(1) / position[:, None]
        return hidden + self.outer(F.gelu(self.inner(so_far)))


class Plain(nn.Module):
    """Embedding, two layers, head: nothing odd about it. Others change one thing."""

    def __init__(self, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(length, WIDTH)
        self.layers = nn.ModuleList([Mixing(), Mixing()])
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)

    def between(self, hidden: Tensor) -> Tensor:
        """What the odd ones do between the layers."""
        return hidden

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        places = torch.arange(input_ids.size(1), device=input_ids.device)
        hidden = self.tokens(input_ids) + self.positions(places)
        hidden = self.layers[1](self.between(self.layers[0](hidden)))
        return SimpleNamespace(logits=self.head(hidden))


class LowRank(nn.Module):
    """A frozen linear layer and a trained correction of low rank, which starts at nothing, as LoRA has it."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Parameter(torch.randn(RANK, frozen.in_features) / frozen.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(frozen.out_features, RANK))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.frozen(hidden) + F.linear(F.linear(hidden, self.down), self.up)


class Idle(Plain):
    """Has a layer that its forward never uses."""

    def __init__(self, vocabulary: int, length: int) -> None:
        super().__init__(vocabulary, length)
        self.idle = nn.Linear(3, 3)


class Dropping(Plain):
    """Dropout as a module and as a rate that the forward hands to the function."""

    def __init__(self, vocabulary: int, length: int) -> None:
        super().__init__(vocabulary, length)
        self.drop, self.hidden_dropout = nn.Dropout(0.2), 0.1

    def between(self, hidden: Tensor) -> Tensor:
        return F.dropout(self.drop(hidden), self.hidden_dropout, self.training)


class Noisy(Plain):
    """Adds noise of a size that stands in no field."""

    def between(self, hidden: Tensor) -> Tensor:
        return hidden + 0.1 * torch.randn_like(hidden) if self.training else hidden


class Normalised(Plain):
    """Statistics over the batch: what a row gives depends on its neighbours."""

    def __init__(self, vocabulary: int, length: int) -> None:
        super().__init__(vocabulary, length)
        self.norm = nn.BatchNorm1d(WIDTH)

    def between(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden.transpose(1, 2)).transpose(1, 2)


def plain(vocabulary_size: int, sequence_length: int) -> nn.Module:
    return Plain(vocabulary_size, sequence_length)


def adapted(vocabulary_size: int, sequence_length: int) -> nn.Module:
    model = Plain(vocabulary_size, sequence_length).requires_grad_(False)
    for layer in model.layers:
        layer.inner, layer.outer = LowRank(layer.inner), LowRank(layer.outer)
    return model


def tied(vocabulary_size: int, sequence_length: int) -> nn.Module:
    model = Plain(vocabulary_size, sequence_length)
    model.head.weight = model.tokens.weight
    return model


def idle(vocabulary_size: int, sequence_length: int) -> nn.Module:
    return Idle(vocabulary_size, sequence_length)


def idle_frozen(vocabulary_size: int, sequence_length: int) -> nn.Module:
    model = Idle(vocabulary_size, sequence_length)
    model.idle.requires_grad_(False)
    return model


def dropping(vocabulary_size: int, sequence_length: int) -> nn.Module:
    return Dropping(vocabulary_size, sequence_length)


def noisy(vocabulary_size: int, sequence_length: int) -> nn.Module:
    return Noisy(vocabulary_size, sequence_length)


def normalised(vocabulary_size: int, sequence_length: int) -> nn.Module:
    return Normalised(vocabulary_size, sequence_length)


class Smoothed:
    """Cross entropy against targets that give a tenth to all tokens alike; sums in the type of the logits."""

    def count(self, micro_batch: Mapping[str, Tensor]) -> int:
        return int((micro_batch["labels"][:, 1:] != -100).sum())

    def sum(self, outputs: Any, micro_batch: Mapping[str, Tensor]) -> Tensor:
        logits = outputs.logits[:, :-1]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
        targets = micro_batch["labels"][:, 1:].flatten()
        return F.cross_entropy(wide, targets, ignore_index=-100, label_smoothing=0.1, reduction="sum")


class Routed(Smoothed):
    """The whole loss of a mixture of experts: the router's balancing term is a mean over the micro-batch's tokens."""

    def sum(self, outputs: Any, micro_batch: Mapping[str, Tensor]) -> Tensor:
        return super().sum(outputs, micro_batch) + 0.1 * self.count(micro_batch) * outputs.aux_loss


def smoothed() -> Smoothed:
    return Smoothed()


def routed() -> Routed:
    return Routed()
