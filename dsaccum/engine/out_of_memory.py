"""Out of memory in mid-window, on some rank: the window becomes void on all of them, and nothing of it remains.

No word reaches a rank that waits inside a reduction. So the one without memory goes on to the window's end with a
stand-in for each micro-batch that is left: one short row whose loss is NaN. Every collective of the window happens, in
its order, and the reduced gradient is not finite on any rank: DeepSpeed discards the step everywhere, as it does after
any NaN. What the void window has changed is then set back. A run that has memory pays for a copy of its buffers and of
its generators in each window, and for no collective.
"""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dsaccum.allocator import is_out_of_memory
from dsaccum.batch import EffectiveBatch

_STAND_IN_TOKENS: Final = 8
_LAST_STAGE: Final = 2
"""ZeRO 3 gathers parameters in mid-forward: a rank that stopped there cannot find back into step."""
_COUNTERS: Final = ("global_steps", "global_samples", "skipped_steps")
_SCALERS: Final = ("loss_scaler", "loss_scale_config")


def can_be_void(engine: Any) -> bool:
    """Whether a window of this engine can be given up in its middle: ZeRO 0 to 2, nothing offloaded."""
    return engine.zero_optimization_stage() <= _LAST_STAGE and not getattr(engine.optimizer, "cpu_offload", False)


def stand_in(micro_batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A row that needs next to no memory, [1, at most 8] of each field."""
    return {name: tensor[:1, :_STAND_IN_TOKENS] for name, tensor in micro_batch.items()}


def nothing_finite(outputs: Any) -> Tensor | float:
    """NaN, whose gradient is NaN for all that the model's outputs depend on.

    The loss alone does not do: where none of a few tokens is a target, its gradient is exactly zero.
    """
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return sum((tensor.float().sum() for tensor in tensors), start=0.0) * math.nan


class WindowRecovery:
    """Sees a window of one rank to its end, whether memory lasts or not.

    Args:
        engine: DeepSpeed's; ``can_be_void``.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._reductions = _Reductions(engine)
        self._before = _State.of(engine)
        self.message: str | None = None
        """What this rank could not get in this window; None while it has memory."""

    def begin_window(self) -> None:
        """Remember what a void window would change."""
        self._before, self.message = _State.of(self._engine), None

    def micro_step(self, real: Callable[[], Tensor], replaced: Callable[[], Tensor]) -> Tensor:
        """Run one: ``real``, or what stands in for it once memory has run out.

        Raises:
            RuntimeError: memory ran out while gradients were on their way between ranks. No stand-in fits there.
        """
        self._reductions.begin_micro_step()
        if self.message is None:
            try:
                return real()
            except Exception as error:
                if not is_out_of_memory(error) or self._reductions.under_way:
                    raise
                self.message = " ".join(str(error).split())
            self._let_go()
        return replaced()

    def undo(self) -> None:
        """Set back what the void window has changed; its step was discarded by DeepSpeed."""
        self._before.restore(self._engine)

    def _let_go(self) -> None:
        """The failed attempt's tensors are gone with its traceback; make room, and leave the backward pass."""
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._reductions.go_on_from_here()
        optimizer = self._engine.optimizer
        while getattr(optimizer, "_backward_active_depth", 0):
            optimizer.exit_backward()


class _Reductions:
    """Which gradients a micro-step has handed over to DeepSpeed's buckets: they are not handed over again.

    ZeRO 2 (and 1, with ``overlap_comm``) does so while the backward pass runs, in the order of the graph.
    """

    def __init__(self, engine: Any) -> None:
        self.under_way = False
        """Inside DeepSpeed's reduction: whether its collective was begun nobody knows."""
        self._handed_over = self._to_skip = 0
        optimizer = engine.optimizer
        for name in ("process_gradients", "reduce_ready_partitions_and_remove_grads"):
            if hasattr(optimizer, name):
                setattr(optimizer, name, self._counted(getattr(optimizer, name)))
                break
        engine.allreduce_gradients = self._marked(engine.allreduce_gradients)

    def begin_micro_step(self) -> None:
        self._handed_over = self._to_skip = 0

    def go_on_from_here(self) -> None:
        self._to_skip, self._handed_over = self._handed_over, 0

    def _counted(self, hand_over: Callable[..., Any]) -> Callable[..., Any]:
        marked = self._marked(hand_over)

        def counted(*arguments: Any, **named: Any) -> Any:
            if self._to_skip:
                self._to_skip -= 1
                return None
            result = marked(*arguments, **named)
            self._handed_over += 1
            return result

        return counted

    def _marked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*arguments: Any, **named: Any) -> Any:
            self.under_way = True
            result = function(*arguments, **named)
            self.under_way = False  # not where it raises: that is what is asked for
            return result

        return marked


@dataclass
class _State:
    """What a window changes even where its step is discarded: counters, loss scales, buffers."""

    counters: dict[str, int]
    scalers: dict[str, dict[str, Any]]
    gradient_scalers: dict[str, dict[str, Any]] = field(default_factory=dict)
    buffers: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, engine: Any) -> _State:
        optimizer, module = engine.optimizer, engine.module
        assert isinstance(module, nn.Module)
        found = {name: getattr(optimizer, name, None) for name in _SCALERS}
        return cls(
            {name: getattr(engine, name) for name in _COUNTERS},
            {name: copy.copy(vars(scaler)) for name, scaler in found.items() if hasattr(scaler, "__dict__")},
            {name: copy.deepcopy(scaler.state_dict()) for name, scaler in _gradient_scalers(engine).items()},
            [(buffer, buffer.detach().clone()) for buffer in module.buffers()],
        )

    def restore(self, engine: Any) -> None:
        for name, value in self.counters.items():
            setattr(engine, name, value)
        for name, values in self.scalers.items():
            vars(getattr(engine.optimizer, name)).update(values)
        for name, state in self.gradient_scalers.items():
            _gradient_scalers(engine)[name].load_state_dict(state)
        for buffer, before in self.buffers:
            buffer.detach().copy_(before)


def _gradient_scalers(engine: Any) -> dict[str, Any]:
    """torch's, where the JSON wants autocast to fp16."""
    places = {
        "engine": (engine, "torch_autocast_z0_gradscaler"),
        "zero": (engine.optimizer, "torch_autocast_gradscaler"),
    }
    found = {name: getattr(owner, attribute, None) for name, (owner, attribute) in places.items()}
    return {name: scaler for name, scaler in found.items() if scaler is not None}


def split_otherwise(engine: Any, batch: EffectiveBatch) -> None:
    """Tell DeepSpeed of another N and B of the same E, at a window's boundary."""
    engine.set_train_micro_batch_size(batch.micro_batch)
    engine.set_train_batch_size(batch.total)
    if hasattr(engine.optimizer, "gradient_accumulation_steps"):
        engine.optimizer.gradient_accumulation_steps = batch.accumulation_steps
    engine.micro_steps = engine.global_steps * batch.accumulation_steps  # the next boundary is N micro-steps from here
