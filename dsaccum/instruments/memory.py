"""Peak memory of windows by category: PyTorch's MemTracker on any device, and CUDA's allocator where there is one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType

from dsaccum.instruments.adapters import adapter_for

CATEGORIES = ("parameter", "gradient", "activation", "optimizer", "temporary")
_CATEGORY_OF = {
    _MemRefType.PARAM: "parameter",
    _MemRefType.BUFFER: "parameter",
    _MemRefType.GRAD: "gradient",
    _MemRefType.ACT: "activation",
    _MemRefType.OPT: "optimizer",
    _MemRefType.TEMP: "temporary",
    _MemRefType.OTH: "temporary",
}


@dataclass(frozen=True)
class MemoryUse:
    """What some windows needed at most, on this rank.

    Attributes:
        peak_bytes: all that the tracker saw, at the worst moment.
        by_category: parameter, gradient, activation, optimizer, temporary at that moment; they add up to it.
        highest: each category's own worst moment.
        in_forward: by category, the worst moment of all that is neither ``engine.backward`` nor ``engine.step``. What
            stands there from earlier micro-steps stands there in full.
        allocator_bytes: the same peak as CUDA's allocator counts it; None without a GPU.
    """

    peak_bytes: int
    by_category: dict[str, int]
    highest: dict[str, int]
    in_forward: dict[str, int]
    allocator_bytes: int | None


def measure_memory(engine: Any, windows: Iterable[Callable[[], object]]) -> MemoryUse:
    """Run the windows and report their peak. Run one window before: the first makes the optimizer's states.

    Works by storages seen in operations, so it costs time but no memory; results stay bit-identical. Masters and
    states count as optimizer; what ZeRO accumulates gradients in counts as gradient from the end of each backward.

    Args:
        engine: the live engine; each ``engine.step()`` ends a micro-step.
        windows: each a call that runs one whole window.
    """
    tracker = _CategoryTracker()
    tracker.track_external(engine.module)
    _tag_standing(tracker, engine)
    device = torch.device(engine.device)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    with _phases_told(engine, tracker), tracker:
        for window in windows:
            window()
    key = _tracked(device, tracker)
    by_category = _by_category(tracker.get_tracker_snapshot("peak").get(key, {}))
    return MemoryUse(
        peak_bytes=sum(by_category.values()),
        by_category=by_category,
        highest=tracker.highest.get(key, dict.fromkeys(CATEGORIES, 0)),
        in_forward=tracker.in_forward.get(key, dict.fromkeys(CATEGORIES, 0)),
        allocator_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else None,
    )


@contextmanager
def _phases_told(engine: Any, tracker: _CategoryTracker) -> Iterator[None]:
    """Inside, the tracker knows when a backward or a step runs, and accumulated gradients are tagged after each."""
    backward, step = engine.backward, engine.step
    saved = {name: engine.__dict__.get(name) for name in ("backward", "step")}

    def backward_then_tag(*arguments: Any, **keywords: Any) -> Any:
        with tracker.beside_forward():
            result = backward(*arguments, **keywords)
        _tag(tracker, _gradient_buffers(engine.optimizer), _MemRefType.GRAD)
        return result

    def step_then_reset(*arguments: Any, **keywords: Any) -> Any:
        with tracker.beside_forward():
            result = step(*arguments, **keywords)
        tracker.reset_mod_stats()
        # What only a reference cycle holds isn't kept, but Python frees it when it gets to it, now or steps later.
        gc.collect()
        return result

    engine.backward, engine.step = backward_then_tag, step_then_reset
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                del engine.__dict__[name]
            else:
                engine.__dict__[name] = value


class _CategoryTracker(MemTracker):
    """Also keeps each category's own maximum: at the peak of the total another category may be small.

    Keeps no statistics by module, which are slow, and of which MemTracker loses track when a module's forward runs
    twice before ``reset_mod_stats``. Its hooks are reduced to what tells parameters, gradients and recomputation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.highest: dict[torch.device, dict[str, int]] = {}
        self.in_forward: dict[torch.device, dict[str, int]] = {}
        self._beside_forward = 0
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @contextmanager
    def beside_forward(self) -> Iterator[None]:
        """Inside, a backward or an optimizer step runs."""
        self._beside_forward += 1
        try:
            yield
        finally:
            self._beside_forward -= 1

    def reset_mod_stats(self) -> None:
        """Look at every module's parameters again: ZeRO 3 has given them other storages."""
        super().reset_mod_stats()
        self._known.clear()

    def _update_peak_stats(self, peak_state: Any) -> None:
        super()._update_peak_stats(peak_state)
        for device, snapshot in self._curr_mem_snap.items():
            now = _by_category(snapshot)
            highest = self.highest.setdefault(device, dict.fromkeys(CATEGORIES, 0))
            highest.update({category: max(size, highest[category]) for category, size in now.items()})
            if not self._beside_forward and sum(now.values()) >= sum(self.in_forward.get(device, {}).values()):
                self.in_forward[device] = now

    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
        if self._mod_tracker.is_bw:  # activation checkpointing recomputes
            if self._ac_mod is None:
                self._ac_mod, self._in_ac = weakref.ref(module), True
        elif module not in self._known:
            self._track_module_params_and_buffers(module, install_grad_hooks=False)
            for parameter in module.parameters(recurse=False):
                self._tag_gradients_of(parameter)
            self._known.add(module)

    def _tag_gradients_of(self, parameter: nn.Parameter) -> None:
        """What MemTracker does itself, except that it also tries to hook frozen parameters, which torch refuses."""
        if not parameter.requires_grad or parameter in self._param_to_grad_hook_handles:
            return
        self._param_to_grad_hook_handles[parameter] = (
            parameter.register_hook(self._is_a_gradient),
            parameter.register_post_accumulate_grad_hook(lambda accumulated: self._is_a_gradient(accumulated.grad)),
        )

    def _is_a_gradient(self, gradient: Tensor | None) -> None:
        if gradient is not None:  # ZeRO has taken it already
            _tag(self, [gradient], _MemRefType.GRAD)

    def _post_fw_hook(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._ac_mod is not None and self._ac_mod() is module:
            self._ac_mod, self._in_ac = None, False

    def _pre_bw_hook(self, module: nn.Module, args: Any) -> None:
        pass

    def _post_bw_hook(self, module: nn.Module, args: Any) -> None:
        pass


def _by_category(snapshot: dict[Any, int]) -> dict[str, int]:
    sums = dict.fromkeys(CATEGORIES, 0)
    for reference, size in snapshot.items():
        if reference in _CATEGORY_OF:
            sums[_CATEGORY_OF[reference]] += size
    return sums


def _tracked(device: torch.device, tracker: MemTracker) -> torch.device:
    """The tracker's own key for this device: it may or may not carry an index."""
    keys = tracker.get_tracker_snapshot("current")
    return next((key for key in keys if key.type == device.type and key.index in (None, device.index)), device)


def _tag_standing(tracker: MemTracker, engine: Any) -> None:
    """What stood before the first window: masters, states, and gradient buffers that are never freed."""
    try:
        adapter = adapter_for(engine)
    except NotImplementedError:
        return
    _tag(tracker, _gradient_buffers(engine.optimizer), _MemRefType.GRAD)
    own = {id(parameter) for parameter in adapter.parameters.values()}
    masters = [place.master for place in adapter.places() if id(place.master) not in own]
    states = [value for state in adapter.base.state.values() for value in state.values() if isinstance(value, Tensor)]
    _tag(tracker, [*masters, *states], _MemRefType.OPT)
    if hasattr(next(iter(adapter.parameters.values()), None), "ds_tensor"):
        _tag(tracker, [parameter.ds_tensor for parameter in adapter.parameters.values()], _MemRefType.PARAM)


def _gradient_buffers(wrapper: Any) -> Iterator[Tensor]:
    """The tensors that a ZeRO wrapper accumulates in, wherever it has them at the moment."""
    for name in ("averaged_gradients", "all_grad_tensors"):
        for pieces in getattr(wrapper, name, {}).values():
            yield from (piece for piece in pieces or () if isinstance(piece, Tensor))
    yield from getattr(wrapper, "fp32_groups_gradients_flat", ())
    for parameters in getattr(wrapper, "bit16_groups", ()):  # ZeRO 1 with another accumulation type
        yield from (p.grad_accum for p in parameters if isinstance(getattr(p, "grad_accum", None), Tensor))
    buffer = getattr(wrapper, "grad_partitions_flat_buffer", None)
    if isinstance(buffer, Tensor):
        yield buffer


def _tag(tracker: MemTracker, tensors: Iterable[Tensor], reference: Any) -> None:
    for tensor in tensors:
        tracker._update_and_maybe_create_winfos(tensor, reference)
