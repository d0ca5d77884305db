"""One window of somebody's script, as it happens: what forwards were given, and what arrived at their outputs.

Nothing is computed here. Outputs go through an identity that copies them (a view would not do: Trainer changes losses
in place) and notes the gradient on its way back, after whatever the engine does to it at the outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dsaccum.watch.module_copy import buffers_of, modes_of
from dsaccum.watch.outputs import copied, tapped


@dataclass
class RandomState:
    """What dropout draws from."""

    cpu: Tensor
    devices: list[Tensor]

    @classmethod
    def now(cls) -> RandomState:
        """As it is."""
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state_all() if cuda else [])

    def restore(self) -> None:
        """Make it so."""
        torch.set_rng_state(self.cpu)
        if self.devices:
            torch.cuda.set_rng_state_all(self.devices)


@dataclass
class Autocast:
    """The autocast that a forward ran under."""

    device: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: torch.device) -> Autocast:
        """As it is."""
        kind = device.type
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))


@dataclass
class Forward:
    """One call of the module whose outputs got a gradient, or may still get one.

    Attributes:
        arguments: copies of what it was given.
        keywords: likewise.
        random: state of the generators before it.
        autocast: that it ran under.
        buffers: before it.
        modes: ``training`` of every part.
        gradients: what arrived at each output, by path; empty where nothing did (yet).
        arrived: norm of the same before the engine's own hooks at the outputs.
        micro_step: the micro-step in which it did; from 0.
    """

    arguments: Any
    keywords: Any
    random: RandomState
    autocast: Autocast
    buffers: dict[str, Tensor]
    modes: list[bool]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    arrived: dict[str, float] = field(default_factory=dict)
    micro_step: int | None = None


class Recorder:
    """Hooks on a module for the length of one window.

    Args:
        module: the user's, live.
        on_failure: told when recording itself fails; the run goes on.
    """

    def __init__(self, module: nn.Module, on_failure: Callable[[Exception], None]) -> None:
        self._module, self._failed = module, on_failure
        self.forwards: list[Forward] = []
        self._current: list[Forward | None] = []
        self._micro_steps: dict[int, int] = {}
        self._handles = [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after),
        ]
        self.at_micro_step: Callable[[int], None] | None = None

    def stop(self) -> None:
        """Take the hooks off; a second time does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def micro_steps(self) -> list[list[Forward]]:
        """Forwards whose outputs got a gradient, by micro-step: one backward pass each."""
        steps: list[list[Forward]] = [[] for _ in set(self._micro_steps.values())]
        for forward in self.forwards:
            if forward.micro_step is not None:
                steps[forward.micro_step].append(forward)
        return [step for step in steps if step]

    def _before(self, module: nn.Module, arguments: Any, keywords: Any) -> None:
        self._current.append(None)
        if not torch.is_grad_enabled() or _is_compiling():
            return
        try:
            device = next((p.device for p in module.parameters()), torch.device("cpu"))
            self._current[-1] = Forward(
                copied(arguments),
                copied(dict(keywords)),
                RandomState.now(),
                Autocast.now(device),
                buffers_of(module),
                modes_of(module),
            )
        except Exception as error:
            self._failed(error)

    def _after(self, module: nn.Module, arguments: Any, output: Any) -> Any:
        forward = self._current.pop() if self._current else None
        if forward is None or not self._handles:
            return None
        try:
            self.forwards.append(forward)
            return tapped(output, lambda path, tensor: self._tap(forward, path, tensor))
        except Exception as error:
            self._failed(error)
            return None

    def _tap(self, forward: Forward, path: str, tensor: Tensor) -> Tensor:
        def note(gradient: Tensor) -> None:
            self._note(forward, path, gradient)

        def arrived(gradient: Tensor | None) -> None:
            if gradient is not None:
                forward.arrived[path] = forward.arrived.get(path, 0.0) + float(gradient.double().norm())

        copy: Tensor = _Tap.apply(tensor, note)
        copy.register_hook(arrived)
        return copy

    def _note(self, forward: Forward, path: str, gradient: Tensor) -> None:
        try:
            task = int(torch._C._current_graph_task_id())
            if forward.micro_step is None:
                forward.micro_step = self._micro_steps.setdefault(task, len(set(self._micro_steps.values())))
                if self.at_micro_step is not None:
                    self.at_micro_step(forward.micro_step)
            else:
                self._micro_steps.setdefault(task, forward.micro_step)
            copy = gradient.detach().clone()
            known = forward.gradients.get(path)
            forward.gradients[path] = copy if known is None else known + copy
        except Exception as error:
            self._failed(error)


class _Tap(torch.autograd.Function):
    """The identity, which notes the gradient on its way back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, note: Callable[[Tensor], None]) -> Tensor:
        """A copy."""
        ctx.note = note
        ctx.set_materialize_grads(False)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The gradient as it came."""
        [gradient] = gradients
        if gradient is not None:
            ctx.note(gradient)
        return gradient, None


def _is_compiling() -> bool:
    return bool(torch.compiler.is_compiling())
