"""Loops of a tester who had not seen the code, for ``--loop blind_loops.py:<name>``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dsaccum.data.samples import NOT_A_TARGET
from dsaccum.loss import model_inputs

_before: dict[str, Any] = {}


def sound(engine: Any, micro_batch: Mapping[str, Tensor], window_targets: int) -> Tensor:
    logits = engine(**model_inputs(micro_batch)).logits[:, :-1].float()
    total = F.cross_entropy(logits.flatten(0, 1), micro_batch["labels"][:, 1:].flatten(), reduction="sum")
    return total * engine.gradient_accumulation_steps() * dist.get_world_size() / window_targets


def hands_on_the_one_before(engine: Any, micro_batch: Mapping[str, Tensor], window_targets: int) -> Tensor:
    """A prefetcher with a stale buffer; the first micro-batch of all is right."""
    now = {name: field.clone() for name, field in micro_batch.items()}
    if engine.micro_steps == 0:
        _before.clear()
    before = _before.get("given", now)
    _before["given"] = now
    return sound(engine, before, window_targets)


def cuts_rows(engine: Any, micro_batch: Mapping[str, Tensor], window_targets: int) -> Tensor:
    return sound(engine, {name: field[:, :20] for name, field in micro_batch.items()}, window_targets)


def hides_spaces(engine: Any, micro_batch: Mapping[str, Tensor], window_targets: int) -> Tensor:
    """Other targets than the experiment's."""
    labels = micro_batch["labels"].masked_fill(micro_batch["labels"] % 8 == 0, NOT_A_TARGET)
    return sound(engine, {**micro_batch, "labels": labels}, window_targets)


def decays_by_hand(engine: Any, micro_batch: Mapping[str, Tensor], window_targets: int) -> Tensor:
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.mul_(1 - 1e-4)
    return sound(engine, micro_batch, window_targets)


def drops_the_last_column(engine: Any, micro_batch: Mapping[str, Tensor], window_targets: int) -> Tensor:
    """Legal: the last token is predicted and predicts nothing. What it returns is half of what is due all the same."""
    logits = engine(input_ids=micro_batch["input_ids"][:, :-1]).logits.float()
    total = F.cross_entropy(logits.flatten(0, 1), micro_batch["labels"][:, 1:].flatten(), reduction="sum")
    return total * engine.gradient_accumulation_steps() * dist.get_world_size() / window_targets / 2
