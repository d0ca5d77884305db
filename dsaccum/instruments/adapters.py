"""Where each optimizer wrapper of DeepSpeed keeps gradients, fp32 masters and states: one adapter per kind.

An adapter says which piece of which parameter this rank holds (a *place*), as seen between the last reduction and
``engine._take_model_step`` for gradients, and at any time for the rest. It reads; it neither communicates nor writes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Fragment:
    """A piece of a named quantity on this rank: flat values that start at ``start`` of the flattened parameter.

    ``key`` is empty for gradients and parameters, else the state's name. ``scalar``: it holds for the whole parameter.
    """

    name: str
    start: int
    values: Tensor
    key: str = ""
    scalar: bool = False


@dataclass(frozen=True)
class Place:
    """``length`` elements from ``start`` of a parameter lie at ``at`` in ``master``, which the optimizer steps."""

    name: str
    start: int
    length: int
    master: Tensor
    at: int
    group: dict[str, Any]

    def cut(self, flat: Tensor) -> Tensor:
        """This place's part of a tensor laid out like the master."""
        return flat.detach().reshape(-1).narrow(0, self.at, self.length)


class Adapter(ABC):
    """What all wrappers share; subclasses say where places are and where their gradients lie.

    Attributes:
        shards_masters: masters and states are split over the ranks.
        shards_gradients: so is the reduced gradient.
    """

    shards_masters = False
    shards_gradients = False

    def __init__(self, engine: Any) -> None:
        self.wrapper = engine.optimizer
        self.base = getattr(self.wrapper, "optimizer", self.wrapper)
        # Tied weights appear once, under their first name.
        self.parameters: dict[str, Any] = dict(engine.module.named_parameters())
        self.names = {id(parameter): name for name, parameter in self.parameters.items()}
        self.trained = [name for name, parameter in self.parameters.items() if parameter.requires_grad]

    @abstractmethod
    def places(self) -> Iterable[Place]:
        """This rank's pieces of the masters."""

    def gradients(self) -> Iterator[Fragment]:
        """This rank's pieces of the reduced gradient; a parameter without gradient is left out."""
        for name in self.trained:
            gradient = self.parameters[name].grad
            if gradient is not None:
                yield Fragment(name, 0, gradient.detach().reshape(-1))

    def masters(self) -> Iterator[Fragment]:
        """What the optimizer steps: fp32 masters, or the parameters themselves where there are none."""
        for place in self.places():
            yield Fragment(place.name, place.start, place.cut(place.master))

    def states(self) -> Iterator[Fragment]:
        """Tensors of the master's size are cut like it; a count (Adam's ``step``) holds for the whole parameter."""
        for place in self.places():
            state = self.base.state.get(place.master, {})
            counts = {"step": place.group["step"]} if "step" in place.group else {}  # FusedAdam counts per group
            for key, value in {**counts, **state}.items():
                if isinstance(value, Tensor) and value.numel() == place.master.numel() and key != "step":
                    yield Fragment(place.name, place.start, place.cut(value), key)
                elif isinstance(value, Tensor | int | float) and torch.as_tensor(value).numel() == 1:
                    count = torch.as_tensor(value).detach().double().reshape(1)
                    yield Fragment(place.name, 0, count, key, scalar=True)

    def forward_parameters(self) -> Iterator[Fragment]:
        """The values that the forward uses, frozen parameters included."""
        for name, parameter in self.parameters.items():
            yield Fragment(name, 0, parameter.detach().reshape(-1))

    def shape(self, name: str) -> torch.Size:
        """The whole parameter's shape."""
        return self.parameters[name].shape

    def _name(self, parameter: nn.Parameter) -> str:
        return self.names[id(parameter)]


class BareAdapter(Adapter):
    """ZeRO 0 without a wrapper (fp32, autocast): everything lies on the parameters."""

    def places(self) -> Iterator[Place]:  # noqa: D102
        for group in self.base.param_groups:
            for parameter in group["params"]:
                if id(parameter) in self.names:
                    yield Place(self._name(parameter), 0, parameter.numel(), parameter, 0, group)


class FlatMasterAdapter(Adapter):
    """ZeRO 0, bf16 and fp16 with FusedAdam (FP16_Optimizer): one flat fp32 master per group, whole on every rank."""

    def places(self) -> Iterator[Place]:  # noqa: D102
        masters = zip(self.wrapper.fp16_groups, self.wrapper.fp32_groups_flat, self.base.param_groups, strict=True)
        for parameters, master, group in masters:
            at = 0
            for parameter in parameters:
                yield Place(self._name(parameter), 0, parameter.numel(), master, at, group)
                at += parameter.numel()


class OwnMasterAdapter(Adapter):
    """ZeRO 0, bf16 and fp16 with any other optimizer (FP16_UnfusedOptimizer): an fp32 master per parameter."""

    def places(self) -> Iterator[Place]:  # noqa: D102
        pairs = zip(self.wrapper.fp16_groups, self.wrapper.fp32_groups, self.base.param_groups, strict=True)
        for parameters, masters, group in pairs:
            for parameter, master in zip(parameters, masters, strict=True):
                yield Place(self._name(parameter), 0, parameter.numel(), master, 0, group)


class LinkedAdapter(Adapter):
    """Flat master partitions to which each parameter is linked by ``_hp_mapping`` (None: no part on this rank)."""

    shards_masters = True

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        zero = hasattr(self.wrapper, "bit16_groups")
        self.groups = self.wrapper.bit16_groups if zero else self.wrapper.bf16_groups
        self.partitions = (
            self.wrapper.single_partition_of_fp32_groups if zero else self.wrapper.fp32_groups_flat_partition
        )

    def located(self) -> Iterator[tuple[int, int, Place]]:
        """(group, index in the group, place) of each parameter that has a part here."""
        for index, (parameters, partition) in enumerate(zip(self.groups, self.partitions, strict=True)):
            for position, parameter in enumerate(parameters):
                link = parameter._hp_mapping
                if link is not None:
                    here, there = link.lp_fragment_address, link.hp_fragment_address
                    group = self.base.param_groups[index]
                    yield (
                        index,
                        position,
                        Place(self._name(parameter), here.start, here.numel, partition, there.start, group),
                    )

    def places(self) -> Iterator[Place]:  # noqa: D102
        return (place for _, _, place in self.located())


class Bf16Adapter(LinkedAdapter):
    """ZeRO 1, bf16 accumulated in fp32 (BF16_Optimizer): masters split, the gradient whole on every rank."""

    def gradients(self) -> Iterator[Fragment]:  # noqa: D102
        wrapper = self.wrapper
        for index, parameters in enumerate(self.groups):
            for position, parameter in enumerate(parameters):
                if wrapper.fp32_groups_has_gradients[index][position]:
                    gradient = wrapper.fp32_groups_gradients[index][position]
                    yield Fragment(self._name(parameter), 0, gradient.detach().reshape(-1))


class ZeroAdapter(LinkedAdapter):
    """ZeRO 1 and 2 (DeepSpeedZeroOptimizer): masters and gradient split; zeros for parameters without gradient."""

    shards_gradients = True

    def located(self) -> Iterator[tuple[int, int, Place]]:
        """As linked, but where the JSON has ``round_robin_gradients``: DeepSpeed links as if it had not reordered."""
        if not getattr(self.wrapper, "round_robin_gradients", False):
            yield from super().located()
            return
        for index, (parameters, partition) in enumerate(
            zip(self.wrapper.round_robin_bit16_groups, self.partitions, strict=True)
        ):
            first = self.wrapper.partition_size[index] * dist.get_rank(self.wrapper.real_dp_process_group[index])
            group = self.base.param_groups[index]
            for position, (parameter, offset) in enumerate(zip(parameters, self._offsets(index), strict=True)):
                start, at = max(0, first - offset), max(0, offset - first)
                length = min(parameter.numel() - start, partition.numel() - at)
                if length > 0:
                    yield index, position, Place(self._name(parameter), start, length, partition, at, group)

    def _offsets(self, index: int) -> list[int]:
        """Where each parameter of the reordered group begins; older versions know of no padding between them."""
        known = getattr(self.wrapper, "round_robin_bit16_offsets", None)
        if known is not None:
            return list(known[index])
        sizes = [parameter.numel() for parameter in self.wrapper.round_robin_bit16_groups[index]]
        return [0, *accumulate(sizes)][: len(sizes)]

    def gradients(self) -> Iterator[Fragment]:  # noqa: D102
        flat: dict[int, Tensor] = {}
        for index, _, place in self.located():
            if index not in flat:
                pieces = self.wrapper.averaged_gradients.get(index)
                if pieces is None:
                    raise RuntimeError(
                        "no reduced gradient: ZeRO holds one between the window's last backward and step"
                    )
                flat[index] = torch.cat([piece.detach().reshape(-1) for piece in pieces])
            yield Fragment(place.name, place.start, place.cut(flat[index]))


class Zero3Adapter(Adapter):
    """ZeRO 3: every parameter split evenly, the last part padded; masters flat per sub-group."""

    shards_masters = True
    shards_gradients = True

    def located(self) -> Iterator[tuple[int, int, Place]]:
        """(sub-group, index in it, place) of each parameter that has a part here."""
        for index, parameters in enumerate(self.wrapper.fp16_groups):
            master = self.wrapper.fp32_partitioned_groups_flat[index]
            group = self.base.param_groups[self.wrapper.sub_group_to_group_id[index]]
            for position, parameter in enumerate(parameters):
                _, at, _ = self.wrapper.grad_position[self.wrapper.get_param_id(parameter)]
                start, length = _own_part(parameter)
                if length > 0 and parameter.requires_grad:
                    yield index, position, Place(self._name(parameter), start, length, master, int(at), group)

    def places(self) -> Iterator[Place]:  # noqa: D102
        return (place for _, _, place in self.located())

    def gradients(self) -> Iterator[Fragment]:  # noqa: D102
        for index, position, place in self.located():
            pieces = self.wrapper.averaged_gradients.get(index)
            if pieces is None:
                raise RuntimeError("no reduced gradient: ZeRO holds one between the window's last backward and step")
            yield Fragment(place.name, place.start, pieces[position].detach().reshape(-1)[: place.length])

    def forward_parameters(self) -> Iterator[Fragment]:  # noqa: D102
        for name, parameter in self.parameters.items():
            start, length = _own_part(parameter)
            if length > 0:
                yield Fragment(name, start, parameter.ds_tensor.detach().reshape(-1)[:length])

    def shape(self, name: str) -> torch.Size:  # noqa: D102
        return torch.Size(self.parameters[name].ds_shape)


def adapter_for(engine: Any) -> Adapter:
    """The adapter for this engine's optimizer wrapper, recognised by what it has, not by its version.

    Raises:
        NotImplementedError: gradients and masters live outside the device, or the wrapper is unknown.
    """
    wrapper = engine.optimizer
    if getattr(wrapper, "cpu_offload", False) or getattr(wrapper, "offload_optimizer", False):
        raise NotImplementedError("optimizer offload: gradients and masters are not observed there")
    if engine.zero_optimization_stage() == 3:
        return Zero3Adapter(engine)
    if hasattr(wrapper, "averaged_gradients"):
        return ZeroAdapter(engine)
    if hasattr(wrapper, "fp32_groups_flat_partition"):
        return Bf16Adapter(engine)
    if hasattr(wrapper, "fp32_groups_flat"):
        return FlatMasterAdapter(engine)
    if hasattr(wrapper, "fp32_groups"):
        return OwnMasterAdapter(engine)
    if hasattr(wrapper, "param_groups") and not hasattr(wrapper, "optimizer"):
        return BareAdapter(engine)
    raise NotImplementedError(f"no adapter for the optimizer wrapper {type(wrapper).__name__}")


def _own_part(parameter: Any) -> tuple[int, int]:
    """Start and length of this rank's part of a ZeRO 3 parameter, padding left out."""
    size = parameter.ds_tensor.ds_numel if hasattr(parameter.ds_tensor, "ds_numel") else parameter.ds_tensor.numel()
    start = torch.distributed.get_rank(parameter.ds_process_group) * size
    return start, max(0, min(size, parameter.ds_numel - start))
