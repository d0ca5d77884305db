"""What a window should communicate, as a formula: bytes handed in on one rank, derived from configuration alone.

With P elements in all trained parameters, b bytes each as communicated, W ranks, N micro-steps:

| wrapper                 | gradient bytes                            | when             | control, at the boundary  |
|-------------------------|-------------------------------------------|------------------|---------------------------|
| none (ZeRO 0, fp32)     | b P                                       | boundary         | 4 with clipping           |
| FP16_* (ZeRO 0, bf16)   | b P                                       | boundary         | 0                         |
| BF16_Optimizer (ZeRO 1) | b (each group, up to a multiple of 2 W)   | boundary         | 0                         |
| ZeRO 1                  | b P                                       | boundary         | 4 per group, + 1 overflow |
| ZeRO 2                  | b P                                       | every micro-step | the same                  |
| ZeRO 3                  | b (each parameter, up to a multiple of W) | every micro-step | 8 per sub-group           |

Under ``torch_autocast`` ZeRO reduces the parameters of linear and convolution layers in the autocast type and the
others in their own, each in buckets of its own: b then differs by parameter. ZeRO 0 reduces all in fp32.

ZeRO takes its norm without clipping too; the overflow flag is reduced in bf16 and fp16. W = 1 calls the collectives
as well. Buckets change the number of operations, not the bytes. A parameter without gradient is reduced as zeros at
ZeRO 0 and in BF16_Optimizer, and left out by ZeRO 1 to 3.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

BARE, HALF, BF16, ZERO = "bare", "half", "bf16", "zero"
"""Kinds of wrapper: none, FP16_Optimizer and FP16_UnfusedOptimizer, BF16_Optimizer, ZeRO's own of stages 1 to 3."""

ZERO_0_BUCKET = 500_000_000
"""Elements per all-reduce at ZeRO 0; not configurable."""


@dataclass(frozen=True)
class TrafficPlan:
    """What the formula needs to know.

    Attributes:
        stage: ZeRO stage.
        wrapper: one of the four kinds.
        groups: elements of each trained parameter, by parameter group (at ZeRO 3 by sub-group).
        itemsize: bytes of one gradient element as communicated.
        itemsizes: the same by parameter, in the shape of ``groups``; None where it is the same for all.
        world_size: data-parallel ranks.
        accumulation_steps: N.
        clipping: the configured limit is above zero.
        computes_norm: ZeRO takes a norm at each boundary (default).
        checks_overflow: ZeRO reduces a flag before the norm (default in bf16 and fp16, not in fp32).
        bucket: elements of a reduce bucket.
    """

    stage: int
    wrapper: str
    groups: tuple[tuple[int, ...], ...]
    itemsize: int
    world_size: int
    accumulation_steps: int
    clipping: bool
    computes_norm: bool = True
    checks_overflow: bool = False
    bucket: int = ZERO_0_BUCKET
    itemsizes: tuple[tuple[int, ...], ...] | None = None

    @property
    def parameters(self) -> list[tuple[int, int]]:
        """(elements, bytes of one) of each trained parameter, over all groups."""
        sizes = self.itemsizes or tuple((self.itemsize,) * len(group) for group in self.groups)
        return [
            pair for group, widths in zip(self.groups, sizes, strict=True) for pair in zip(group, widths, strict=True)
        ]


@dataclass(frozen=True)
class ExpectedTraffic:
    """One micro-step's gradient and control bytes, and the least and most gradient operations."""

    micro_step: int
    gradient_bytes: int
    control_bytes: int
    gradient_operations: tuple[int, int]


def plan_of(engine: Any, without_gradient: Collection[str] = ()) -> TrafficPlan:
    """Read the plan off a live engine's configuration; nothing is measured and nothing communicated.

    Args:
        engine: the live engine.
        without_gradient: trained parameters that no micro-batch of the window uses.
    """
    wrapper, stage = engine.optimizer, int(engine.zero_optimization_stage())
    kind = _kind(engine)
    unused = {id(p) for name, p in engine.module.named_parameters() if name in without_gradient and kind == ZERO}
    groups = _groups(engine, unused)
    return TrafficPlan(
        stage=stage,
        wrapper=kind,
        groups=tuple(tuple(_size(parameter) for parameter in group) for group in groups),
        itemsize=engine.communication_data_type.itemsize,
        world_size=engine.dp_world_size,
        accumulation_steps=engine.gradient_accumulation_steps(),
        clipping=engine.gradient_clipping() > 0,
        computes_norm=bool(getattr(wrapper, "compute_grad_norm", True)),
        checks_overflow=bool(getattr(wrapper, "check_grad_overflow", False)),
        bucket=int(engine.zero_reduce_bucket_size()) if kind == ZERO else ZERO_0_BUCKET,
        itemsizes=_itemsizes(wrapper, groups) if kind == ZERO else None,
    )


def expected_traffic(plan: TrafficPlan) -> list[ExpectedTraffic]:
    """Micro-steps 1 to N of any window but the first."""
    each_time = plan.stage >= 2
    once = expected_gradient_bytes(plan)
    steps = range(1, plan.accumulation_steps + 1)
    last = plan.accumulation_steps
    return [
        ExpectedTraffic(
            micro_step=step,
            gradient_bytes=once if each_time or step == last else 0,
            control_bytes=expected_control_bytes(plan) if step == last else 0,
            gradient_operations=_operations(plan) if each_time or step == last else (0, 0),
        )
        for step in steps
    ]


def expected_gradient_bytes(plan: TrafficPlan) -> int:
    """Bytes of one reduction of the whole gradient, padding included."""
    if plan.wrapper == BF16:
        return plan.itemsize * sum(_up_to_multiple(sum(group), 2 * plan.world_size) for group in plan.groups)
    multiple = plan.world_size if plan.stage == 3 else 1
    return sum(_up_to_multiple(elements, multiple) * itemsize for elements, itemsize in plan.parameters)


def expected_control_bytes(plan: TrafficPlan) -> int:
    """Norms and flags at the boundary."""
    if plan.wrapper == BARE:
        return 4 if plan.clipping else 0
    if plan.wrapper != ZERO:
        return 0
    if plan.stage == 3:
        return 8 * len(plan.groups)
    return (4 * len(plan.groups) if plan.computes_norm else 0) + (1 if plan.checks_overflow else 0)


def _operations(plan: TrafficPlan) -> tuple[int, int]:
    """A bucket is flushed when the next tensor would overfill it, so two neighbours hold more than one bucket.

    Each type has buckets of its own.
    """
    if plan.wrapper == BF16:  # one flat tensor per group; a bucket is closed by the tensor that overfills it
        elements = sum(sum(group) for group in plan.groups)
        return 1, min(len(plan.groups), 2 * elements // plan.bucket + 1)
    least = most = 0
    for itemsize in {itemsize for _, itemsize in plan.parameters}:
        tensors = [elements for elements, own in plan.parameters if own == itemsize]
        least += 1 if plan.wrapper != ZERO else -(-sum(tensors) // max(plan.bucket, *tensors))
        most += min(len(tensors), 2 * sum(tensors) // plan.bucket + 1)
    return least, most


def _kind(engine: Any) -> str:
    """Which of the four kinds of wrapper the engine's optimizer has."""
    wrapper = engine.optimizer
    if engine.zero_optimization_stage() == 3 or hasattr(wrapper, "averaged_gradients"):
        return ZERO
    if hasattr(wrapper, "fp32_groups_flat_partition"):
        return BF16
    return HALF if hasattr(wrapper, "fp16_groups") else BARE


def _groups(engine: Any, unused: set[int]) -> list[list[Any]]:
    """Trained parameters by group, without those that are not used."""
    wrapper = engine.optimizer
    held = ("bit16_groups", "bf16_groups", "fp16_groups")
    own = [group["params"] for group in wrapper.param_groups]
    groups = next((getattr(wrapper, name) for name in held if hasattr(wrapper, name)), own)
    return [[p for p in group if p.requires_grad and id(p) not in unused] for group in groups]


def _itemsizes(wrapper: Any, groups: list[list[Any]]) -> tuple[tuple[int, ...], ...] | None:
    """Bytes of an element by parameter, as ZeRO chooses them; None in versions that have one type for all."""
    dtype_of = getattr(wrapper, "get_param_comm_dtype", None)
    if dtype_of is None:
        return None
    return tuple(tuple(dtype_of(parameter).itemsize for parameter in group) for group in groups)


def _size(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _up_to_multiple(count: int, of: int) -> int:
    return -(-count // of) * of
