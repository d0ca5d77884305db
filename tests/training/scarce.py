"""Models whose memory runs out when it is told to, as CUDA's allocator says it: tests of the automatic micro-batch."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from tests.cases import tiny_gpt

MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1.00 GiB"


class _NoBackward(torch.autograd.Function):
    """Lets values through; there is no memory for their gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        raise torch.OutOfMemoryError(MESSAGE)


class Scarce(nn.Module):
    """A GPT that has no memory in one of its calls.

    Args:
        gpt: the model.
        call: which one, from 1; None for none.
        where: ``forward``; ``backward``, before any gradient is there; ``mid-backward``, when that of the head and the
            second layer are.
    """

    def __init__(self, gpt: nn.Module, call: int | None, where: str) -> None:
        super().__init__()
        self.gpt, self.calls, self._call, self._where = gpt, 0, call, where
        self.register_buffer("seen", torch.zeros(()))
        gpt.transformer.h[0].register_forward_hook(self._after_first_layer)

    @property
    def config(self) -> Any:
        return self.gpt.config

    def _now(self, where: str) -> bool:
        return self.calls == self._call and self._where == where

    def _after_first_layer(self, layer: nn.Module, inputs: Any, output: Any) -> Any:
        if not self._now("mid-backward"):
            return None
        self._call = None  # not in the stand-in that follows
        return _NoBackward.apply(output) if isinstance(output, Tensor) else (_NoBackward.apply(output[0]), *output[1:])

    def forward(self, **inputs: Tensor) -> Any:
        self.calls += 1
        self.seen += len(inputs["input_ids"])  # what batch norm does: not undone by a discarded step
        if self._now("forward"):
            raise torch.OutOfMemoryError(MESSAGE)
        outputs = self.gpt(**inputs)
        if self._now("backward"):
            outputs.logits = _NoBackward.apply(outputs.logits)
        return outputs


class Limited(nn.Module):
    """A GPT on a device that holds so many rows of activations, and once, on one rank, not even these.

    A plan does not know of it: tensors without storage take no memory.
    """

    def __init__(self, gpt: nn.Module, rows: int, call: int | None, where: str) -> None:
        super().__init__()
        self.scarce, self._rows = Scarce(gpt, call, where), rows

    @property
    def config(self) -> Any:
        return self.scarce.config

    def forward(self, **inputs: Tensor) -> Any:
        rows = len(inputs["input_ids"])
        if isinstance(next(self.parameters()), FakeTensor):
            return self.scarce.gpt(**inputs)
        if not torch.is_grad_enabled():
            if rows > int(os.environ.get("SCARCE_EVALUATED_ROWS", rows)):
                raise torch.OutOfMemoryError(MESSAGE)
            return self.scarce.gpt(**inputs)
        if rows > self._rows:
            raise torch.OutOfMemoryError(MESSAGE)
        # The call is counted among those that are as large as can be: no stand-ins, but where 1 row is that large.
        return self.scarce(**inputs) if rows == self._rows else self.scarce.gpt(**inputs)


def limited_model(vocabulary_size: int, sequence_length: int) -> nn.Module:
    """For ``model.factory``: SCARCE_ROWS fit, but for the call SCARCE_CALL of these on the last rank."""
    from transformers import GPT2Config, GPT2LMHeadModel

    last = int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1
    config = GPT2Config(
        vocab_size=vocabulary_size, n_positions=sequence_length, n_embd=32, n_layer=2, n_head=2, bos_token_id=1,
        eos_token_id=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    call = int(os.environ.get("SCARCE_CALL", 0)) if last else 0
    where = os.environ.get("SCARCE_WHERE", "forward")
    return Limited(GPT2LMHeadModel(config), int(os.environ["SCARCE_ROWS"]), call or None, where)


def scarce_gpt(call: int | None, where: str) -> Scarce:
    """The tiny GPT of the other tests."""
    return Scarce(tiny_gpt(), call, where)
