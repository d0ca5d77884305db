"""The settings and the parameters that an engine's memory depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Device = Literal["cpu", "cuda"]

ITEM_SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class OptimizerUse:
    """What an optimizer needs beside parameters and gradients.

    Attributes:
        states: bytes that it keeps.
        temporary: bytes that its step needs on the way at most.
    """

    states: int
    temporary: int


@dataclass(frozen=True)
class Layout:
    """A model and a config, as far as an engine's memory goes; sizes count elements unless they are bytes.

    Attributes:
        trained: elements of each trained parameter, by its index in ``model.parameters()``, in that order.
        frozen: elements of all others, buffers included.
        of_module: indices of the parameters that a module holds itself, by its index in ``model.modules()``.
        stage: ZeRO stage.
        precision: of the weights: fp32, bf16 or fp16.
        accumulation: of the gradients that micro-batches add up in.
        communication: of what is reduced, by trained parameter.
        world_size: W.
        rank: whose memory it is.
        device: where.
        clipping: the gradient's norm is limited.
        fused_adam: DeepSpeed's own Adam, for which the wrapper of ZeRO 0 in bf16 is another one.
        reduce_bucket: ``reduce_bucket_size``.
        overlaps: ``overlap_comm``.
        scatters: ``reduce_scatter``.
        prefetch, max_live, max_reuse, persistence: the ``stage3_*`` options of these names.
        sub_group: ``sub_group_size``.
        optimizer: what the optimizer needs for tensors of so many elements.
    """

    trained: Mapping[int, int]
    frozen: int
    of_module: Mapping[int, list[int]]
    stage: int
    precision: str
    accumulation: str
    communication: dict[int, str]
    world_size: int
    rank: int
    device: Device
    clipping: bool
    fused_adam: bool
    reduce_bucket: int
    overlaps: bool
    scatters: bool
    prefetch: int
    max_live: int
    max_reuse: int
    persistence: int
    sub_group: int
    optimizer: Callable[[tuple[int, ...]], OptimizerUse]

    @property
    def elements(self) -> int:
        """P: of all trained parameters."""
        return sum(self.trained.values())

    @property
    def weight_bytes(self) -> int:
        """Of one element of a parameter, and of its gradient as autograd makes it."""
        return ITEM_SIZES[self.precision]

    @property
    def accumulation_bytes(self) -> int:
        """Of one element of an accumulated gradient."""
        return ITEM_SIZES[self.accumulation]

    def communication_bytes(self, parameter: int) -> int:
        """Of one element of this parameter's gradient as it is reduced."""
        return ITEM_SIZES[self.communication[parameter]]


def up_to_multiple(number: int, of: int) -> int:
    """The next multiple that is not smaller."""
    return -(-number // of) * of
