"""A checkpoint's weights and optimizer states, whole and by name, read from its files without DeepSpeed's loader.

ZeRO 0, fp32       the model's file holds the weights, and torch's own state dict of the optimizer
ZeRO 0, low        the same with fp32 masters, one for each parameter or flat for each group
ZeRO 1 and 2       each rank's file has a share of every flat group; all shares in a row are the group, in which
                   parameters stand one after another in the order of ``param_shapes``
ZeRO 3             each rank's file has ceil(n / W) elements of every parameter, one after another; the last
                   rank's end in padding
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsaccum.engine.state_files import TAG, only_known_classes
from dsaccum.training.checkpoints.shelf import Checkpoint

Shapes = Mapping[str, torch.Size]
_MODEL, _SHARE = "mp_rank_00_model_states.pt", "zero_pp_rank_{rank}_mp_rank_00_{what}_states.pt"


class UnknownLayout(Exception):
    """The files hold what this reader does not know."""


@dataclass(frozen=True)
class SavedState:
    """What a reference goes on from.

    Attributes:
        weights: what the optimizer steps, in its own precision, [shape of the parameter].
        states: the same of the optimizer's states; counts are scalars.
        fixed: buffers, and parameters that are not trained.
    """

    weights: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]
    fixed: dict[str, Tensor]


def read_saved_state(checkpoint: Checkpoint, trained: Shapes) -> SavedState:
    """Read it; nothing but tensors, containers and DeepSpeed's own few classes is unpickled.

    Args:
        checkpoint: whole.
        trained: shapes of the parameters that are trained, in the model's order.

    Raises:
        UnknownLayout: another than those above.
        OSError, pickle.UnpicklingError: a file can't be read.
    """
    directory, manifest = checkpoint.path / TAG, checkpoint.manifest
    ranks, stage = range(manifest.split.world_size), manifest.zero_stage
    try:
        if stage == 3:
            models = [_load(directory / _SHARE.format(rank=rank, what="model")) for rank in ranks]
            shares = [_load(_optimizer_file(directory, rank))["optimizer_state_dict"] for rank in ranks]
            weights, states = _from_parts(models[0]["param_shapes"], shares)
            fixed = {**models[0]["module"], **_frozen(models)}
        else:
            model = _load(directory / _MODEL)
            fixed = dict(model["module"])
            if stage == 0:
                weights, states = _from_whole(model, trained)
            else:
                shares = [_load(_optimizer_file(directory, rank))["optimizer_state_dict"] for rank in ranks]
                weights, states = _from_groups(model["param_shapes"], shares)
        missing = sorted(trained.keys() - weights.keys())
        if missing:
            raise UnknownLayout(f"they hold no weights of {missing[0]}")
        whole = {name: weights[name].detach().reshape(shape).clone() for name, shape in trained.items()}
        own = {name: _shaped(states.get(name, {}), shape) for name, shape in trained.items()}
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
        raise UnknownLayout(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
    return SavedState(whole, own, {name: value.detach() for name, value in fixed.items() if name not in trained})


def _load(path: Path) -> Any:
    with only_known_classes():
        return torch.load(path, map_location="cpu", weights_only=True)


def _optimizer_file(directory: Path, rank: int) -> Path:
    name = _SHARE.format(rank=rank, what="optim")
    return next((path for path in (directory / name, directory / f"bf16_{name}") if path.exists()), directory / name)


Values = dict[str, Tensor]
States = dict[str, dict[str, Any]]


def _from_whole(model: Any, trained: Shapes) -> tuple[Values, States]:
    """ZeRO 0. Torch numbers the optimizer's parameters in the order in which it was given them."""
    optimizer, names = model["optimizer"], list(trained)
    if "state" in optimizer:
        weights = {name: model["module"][name] for name in names}
        return weights, {name: dict(optimizer["state"].get(index, {})) for index, name in enumerate(names)}
    states = optimizer["optimizer_state_dict"]["state"]
    if "fp32_groups_flat" in optimizer:
        return _cut([trained], optimizer["fp32_groups_flat"], [states[index] for index in range(len(states))])
    masters = [master for group in optimizer["fp32_groups"] for master in group]
    return dict(zip(names, masters, strict=True)), {name: dict(states[index]) for index, name in enumerate(names)}


def _from_groups(shapes: Sequence[Shapes], shares: Sequence[Any]) -> tuple[Values, States]:
    """ZeRO 1 and 2."""
    groups = range(len(shapes))
    of_share = [share["base_optimizer_state"]["state"] for share in shares]
    flat = [torch.cat([share["single_partition_of_fp32_groups"][group] for share in shares]) for group in groups]
    states = [_joined([state[group] for state in of_share]) for group in groups]
    return _cut(shapes, flat, states)


def _cut(
    shapes: Sequence[Shapes], flat: Sequence[Tensor], states: Sequence[Mapping[str, Any]]
) -> tuple[Values, States]:
    """Flat groups, parameter by parameter."""
    weights: Values = {}
    found: States = {}
    for group, whole, state in zip(shapes, flat, states, strict=True):
        at = 0
        for name, shape in group.items():
            size = shape.numel()
            weights[name] = whole[at : at + size]
            found[name] = {key: _part(value, whole, slice(at, at + size)) for key, value in state.items()}
            at += size
    return weights, found


def _joined(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        key: torch.cat([state[key] for state in states]) if _has_elements(value) else value
        for key, value in states[0].items()
    }


def _from_parts(shapes: Sequence[Shapes], shares: Sequence[Any]) -> tuple[Values, States]:
    """ZeRO 3."""
    weights: Values = {}
    found: States = {}
    for group, of_group in enumerate(shapes):
        flat = [share["fp32_flat_groups"][group] for share in shares]
        states = [share["optimizer_state_dict"]["state"][group] for share in shares]
        at = 0
        for name, shape in of_group.items():
            size = -(-shape.numel() // len(shares))
            here = slice(at, at + size)
            weights[name] = torch.cat([each[here] for each in flat])[: shape.numel()]
            found[name] = {
                key: torch.cat([state[key][here] for state in states])[: shape.numel()]
                if _has_elements(value)
                else value
                for key, value in states[0].items()
            }
            at += size
    return weights, found


def _frozen(models: Sequence[Any]) -> dict[str, Tensor]:
    shapes = models[0].get("frozen_param_shapes") or {}
    return {
        name: torch.cat([model["frozen_param_fragments"][name] for model in models])[: shape.numel()].reshape(shape)
        for name, shape in shapes.items()
    }


def _part(value: Any, whole: Tensor, here: slice) -> Any:
    """Of a state that has an element for each of the group; a count holds for all of it."""
    return value[here] if _has_elements(value) and len(value) == len(whole) else value


def _has_elements(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _shaped(states: Mapping[str, Any], shape: torch.Size) -> dict[str, Tensor]:
    """Elements in the parameter's shape, counts as float64 scalars, as the run's own are seen."""
    shaped = {}
    for key, value in states.items():
        if isinstance(value, Tensor) and value.dim() and value.numel() == shape.numel() and key != "step":
            shaped[key] = value.reshape(shape).clone()
        elif isinstance(value, Tensor | int | float):
            shaped[key] = torch.as_tensor(value).detach().double().reshape(())
    return shaped
