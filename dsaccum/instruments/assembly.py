"""Fragments from all ranks made whole, on the CPU: one exchange for any number of tensors, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsaccum.instruments.adapters import Fragment

Label = tuple[str, str, int, int, torch.dtype, bool]
"""Name, key, start, number of elements, dtype, scalar."""


def assemble(
    fragments: Iterable[Fragment], shape: Callable[[str], torch.Size], engine: Any, *, sharded: bool
) -> dict[tuple[str, str], Tensor]:
    """Whole tensors by (name, key), in the dtype they have; a collective where ``sharded`` and W > 1.

    Raises:
        RuntimeError: the pieces of some tensor do not cover it.
    """
    own = list(fragments)
    group = data_parallel_group(engine)
    labels: list[list[Label]] = [[_label(fragment) for fragment in own]]
    payloads = [_bytes(own)]
    if sharded and dist.get_world_size(group) > 1:
        labels, payloads = _exchange(labels[0], payloads[0], group, torch.device(engine.device))
    whole: dict[tuple[str, str], Tensor] = {}
    filled: dict[tuple[str, str], int] = {}
    for rank_labels, payload in zip(labels, payloads, strict=True):
        offset = 0
        for name, key, start, count, dtype, scalar in rank_labels:
            size = count * dtype.itemsize
            values = payload[offset : offset + size].clone().view(dtype)
            offset += size
            if scalar:
                whole[name, key] = values.reshape(())
                continue
            target = whole.setdefault((name, key), torch.empty(shape(name), dtype=dtype))
            target.view(-1)[start : start + count] = values
            filled[name, key] = filled.get((name, key), 0) + count
    for (name, key), count in filled.items():
        if count != whole[name, key].numel():
            raise RuntimeError(f"{name} {key}: pieces cover {count} of {whole[name, key].numel()} elements")
    return whole


def data_parallel_group(engine: Any) -> Any:
    """The ranks over which gradients are averaged; None means all."""
    return getattr(engine, "seq_data_parallel_group", None)


def _label(fragment: Fragment) -> Label:
    values = fragment.values
    return fragment.name, fragment.key, fragment.start, values.numel(), values.dtype, fragment.scalar


def _bytes(fragments: list[Fragment]) -> Tensor:
    pieces = [fragment.values.contiguous().view(torch.uint8).cpu() for fragment in fragments]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)


def _exchange(
    labels: list[Label], payload: Tensor, group: Any, device: torch.device
) -> tuple[list[list[Label]], list[Tensor]]:
    """Everyone's labels and bytes. ``torch.distributed`` itself, so that DeepSpeed's logger doesn't count us."""
    world_size = dist.get_world_size(group)
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, labels, group=group)
    sizes = [sum(count * dtype.itemsize for _, _, _, count, dtype, _ in of_rank) for of_rank in gathered]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: payload.numel()] = payload.to(device)
    received = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(received, padded, group=group)
    return gathered, [values[:size].cpu() for values, size in zip(received, sizes, strict=True)]
