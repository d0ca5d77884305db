"""Bringing a window's ranks together without ever hanging the run."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

LONGEST_WAIT = timedelta(seconds=120)
YES, NO = b"yes", b"no"


def world_of(group: Any) -> tuple[int, int]:
    """(rank, size) in the group of the ranks that share a gradient; (0, 1) where there are no ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def all_agree(occasion: str, group: Any) -> bool:
    """Whether every rank has come, and none has declined; asked through the store, so that no rank can hang another.

    Raises:
        TimeoutError: a rank did neither.
    """
    if world_of(group)[1] == 1:
        return True
    return all(answer == YES for answer in _answers(f"{occasion}/agree", group))


def decline(occasion: str, group: Any) -> None:
    """Say for this rank that it can't take part, and wait for nobody."""
    rank, size = world_of(group)
    if size > 1:
        with suppress(Exception):
            _store().set(_key(f"{occasion}/agree", _ranks(group)[rank]), NO)


def gathered(own: Any, occasion: str, group: Any) -> list[Any]:
    """Everybody's object, in the order of ranks.

    The collective begins when all ranks have said that they are there, so that a rank that isn't can't hang the rest.

    Raises:
        TimeoutError: a rank did not come.
    """
    size = world_of(group)[1]
    if size == 1:
        return [own]
    _answers(f"{occasion}/gather", group)
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, own, group=group)
    return everyone


def _answers(occasion: str, group: Any) -> list[bytes]:
    ranks, store = _ranks(group), _store()
    own = ranks[world_of(group)[0]]
    store.set(_key(occasion, own), YES)
    keys = [_key(occasion, each) for each in ranks]
    try:
        store.wait(keys, LONGEST_WAIT)
    except Exception as error:
        raise TimeoutError("the other ranks did not come to the same optimizer step") from error
    return [store.get(key) for key in keys]


def _key(occasion: str, rank: int) -> str:
    return f"dsaccum/watch/{occasion}/{rank}"


def _ranks(group: Any) -> list[int]:
    return list(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
