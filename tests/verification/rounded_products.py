"""``model.factory`` of test_fp32_products.py: asks for rounded products, and rounds as a GPU would."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

torch.set_float32_matmul_precision("high")


class Rounded(nn.Module):
    """Predicts the next byte from this one."""

    def __init__(self, vocabulary_size: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary_size, 16), nn.Linear(16, vocabulary_size)

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        hidden = self.embedding(input_ids)
        if torch.backends.cuda.matmul.fp32_precision == "tf32" and hidden.dtype == torch.float32:
            hidden = hidden + (hidden.bfloat16().float() - hidden).detach()
        return SimpleNamespace(logits=self.head(hidden))


def model(vocabulary_size: int, sequence_length: int) -> nn.Module:
    return Rounded(vocabulary_size)
