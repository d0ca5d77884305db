"""Are the ranks' copies of the parameters the same to the bit? A checksum per parameter, computed where it lies."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsaccum.instruments.assembly import data_parallel_group

CHUNK = 1 << 22
"""Words at a time: bounds the memory that a checksum needs."""


def checksum(values: Tensor) -> int:
    """A 64-bit number from every bit of a tensor: any one changed word, and any exchange of two, changes it."""
    flat = values.detach().contiguous().reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    width = 8 * CHUNK
    for start in range(0, flat.numel(), width):
        piece = flat[start : start + width]
        whole = piece.numel() // 8 * 8
        words = piece[:whole].clone().view(torch.int64)
        rest = piece[whole:].to(torch.int64)
        # Integers wrap at 2^64; an odd factor loses no bit of its word.
        for numbers, first in ((words, start // 8), (rest, start // 8 + words.numel())):
            places = torch.arange(first, first + numbers.numel(), device=flat.device)
            total += (_mixed(numbers) * (2 * places + 1)).sum()
    return int(total)


def parameter_checksums(engine: Any) -> dict[str, int]:
    """This rank's checksum of every parameter that it holds whole; no collective.

    At ZeRO 3 those are only the persistent ones: the others exist once, in parts.
    """
    return {name: checksum(parameter) for name, parameter in engine.module.named_parameters() if _is_whole(parameter)}


def differing_replicas(engine: Any) -> list[str]:
    """Names of the parameters whose copies differ between ranks; the same list on every rank. A collective."""
    own = parameter_checksums(engine)
    group = data_parallel_group(engine)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    return [name for name in own if len({sums.get(name) for sums in everyone}) > 1]


def _mixed(words: Tensor) -> Tensor:
    """Each word spread over all its bits, reversibly: neighbouring sums of plain words could cancel."""
    words = words * -7046029254386353131  # 0x9E3779B97F4A7C15, odd
    return words ^ (words >> 29)


def _is_whole(parameter: Any) -> bool:
    return not hasattr(parameter, "ds_id") or parameter.numel() == parameter.ds_numel
