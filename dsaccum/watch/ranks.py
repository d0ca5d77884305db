"""Bringing a window's ranks together without ever hanging the run."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

LONGEST_WAIT = timedelta(seconds=120)


def world_of(group: Any) -> tuple[int, int]:
    """(rank, size) in the group of the ranks that share a gradient; (0, 1) where there are no ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def gathered(own: Any, name: str, group: Any) -> list[Any]:
    """Everybody's object, in the order of ranks; only one's own, if the others don't come in time.

    The collective begins when all ranks have said that they are there, so that a rank that isn't can't hang the rest.
    """
    rank, size = world_of(group)
    if size == 1:
        return [own]
    store = dist.distributed_c10d._get_default_store()
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    store.set(f"dsaccum/watch/{name}/{ranks[rank]}", "here")
    try:
        store.wait([f"dsaccum/watch/{name}/{each}" for each in ranks], LONGEST_WAIT)
    except Exception as error:
        raise TimeoutError("the other ranks did not come to the same optimizer step") from error
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, own, group=group)
    return everyone
