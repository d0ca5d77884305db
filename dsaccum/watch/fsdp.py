"""What FSDP2 (``fully_shard``) has made of a module: its parameters whole again, and its parts without FSDP2.

``fully_shard`` works from the innermost part outwards, changes each part's class, and forbids copies. So the copy is
made of what it left: of each part an empty one of its former class, filled with copies of all that isn't FSDP2's.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

from torch import Tensor, nn


class NotGathered(Exception):
    """This kind of sharding is not watched; the message says why."""


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 has any part of it."""
    return any(_former_class(part) is not None for part in module.modules())


def class_name(module: nn.Module) -> str:
    """As the script has it."""
    return (_former_class(module) or type(module)).__name__


def whole(tensor: Any) -> Any:
    """All of a tensor whose parts lie on several ranks, which call this together; others as they are."""
    gather = getattr(tensor, "full_tensor", None)
    return gather() if gather is not None else tensor


def own_part(tensor: Tensor) -> Tensor:
    """What this rank has of it; nobody is asked."""
    local = getattr(tensor, "to_local", None)
    return local() if local is not None else tensor


def group_of(module: nn.Module) -> Any:
    """The ranks that share its gradient.

    Raises:
        NotGathered: its parameters are sharded otherwise than by FSDP2 over all of them, or rounded on the way.
    """
    meshes = {p.device_mesh for p in module.parameters() if hasattr(p, "device_mesh")}
    if any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules()):
        raise NotGathered("the first FSDP, only fully_shard")
    if not meshes:
        return None
    if not is_sharded(module):
        raise NotGathered("parameters that are DTensors without fully_shard")
    if len(meshes) > 1 or next(iter(meshes)).ndim != 1:
        raise NotGathered("FSDP2 on more than one dimension of a mesh")
    for part in module.modules():
        policy = getattr(_state_of(part), "_mp_policy", None)
        if getattr(policy, "param_dtype", None) is not None or getattr(policy, "reduce_dtype", None) is not None:
            raise NotGathered("FSDP2 in mixed precision")
    return meshes.pop().get_group()


def put_former_parts(module: nn.Module, memo: dict[int, Any]) -> None:
    """Into the memo of a ``deepcopy`` that is to follow: copies of the parts that FSDP2 has."""
    parts = {part: kind for part in module.modules() if (kind := _former_class(part)) is not None}
    shells = {part: kind.__new__(kind) for part, kind in parts.items()}
    memo.update({id(part): shell for part, shell in shells.items()})
    for part, shell in shells.items():
        shell.__setstate__(copy.deepcopy({key: _without_fsdp(value) for key, value in vars(part).items()}, memo))


def _without_fsdp(value: Any) -> Any:
    if not isinstance(value, OrderedDict):  # as hooks are kept, and FSDP2's own state
        return value
    return OrderedDict((key, each) for key, each in value.items() if not _is_fsdps(each))


def _is_fsdps(thing: object) -> bool:
    owner = getattr(thing, "__self__", thing)  # of a method
    return type(owner).__module__.startswith("torch.distributed.fsdp")


def _former_class(part: nn.Module) -> Any:
    """None where FSDP2 doesn't have it."""
    bases = type(part).__bases__
    return bases[1] if len(bases) == 2 and bases[0].__name__ == "FSDPModule" else None


def _state_of(part: nn.Module) -> Any:
    return part._get_fsdp_state() if _former_class(part) is not None else None  # type: ignore[operator]
