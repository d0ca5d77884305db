"""One window of somebody's script, as it happens: what forwards were given, and what arrived at their outputs.

Nothing is computed here and nothing replaced: tensor hooks on the outputs note the gradient that passes, before and
after the engine's own hooks there. (Copies of the outputs in their place would not do: DeepSpeed 0.18.3 to 0.19.5
divide by N a second time where logits lead to the loss, and copies of logits lead nowhere.)
"""

from __future__ import annotations

import math
import random
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dsaccum.instruments.replicas import checksum
from dsaccum.watch.fsdp import is_sharded, own_part
from dsaccum.watch.measuring import WindowMeasures
from dsaccum.watch.module_copy import buffers_of, modes_of
from dsaccum.watch.operations import aside
from dsaccum.watch.outputs import copied, leaves

LARGE_BYTES = 1 << 26
"""Gradients of larger outputs are not kept where they can be computed again."""


@dataclass
class RandomState:
    """What dropout draws from, and what else a module may: Python's generator, and NumPy's where it is loaded."""

    cpu: Tensor
    devices: list[Tensor]
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> RandomState:
        """As it is."""
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        devices = torch.cuda.get_rng_state_all() if cuda else []
        numpy = _numpy_random()
        return cls(torch.get_rng_state(), devices, random.getstate(), numpy.get_state() if numpy else None)

    def restore(self) -> None:
        """Make it so."""
        torch.set_rng_state(self.cpu)
        random.setstate(self.python)
        if self.numpy is not None:
            _numpy_random().set_state(self.numpy)
        if self.devices:
            torch.cuda.set_rng_state_all(self.devices)


def _numpy_random() -> Any:
    return sys.modules.get("numpy.random")


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
        gradients: what went on from each output towards the parameters, by path: all of it, whether it came from the
            script or from another output; empty where nothing did (yet).
        factors: instead, for large outputs that got theirs from another output: what hooks multiplied it by.
        arrived: its norm before the engine's own hooks.
        passed: and after them.
        norms: of its outputs.
        tasks: backward passes that came by, and whether each was itself to be differentiated.
        passing: paths where the engine may have hooks.
        micro_step: the micro-step in which it did; from 0.
    """

    arguments: Any
    keywords: Any
    random: RandomState
    autocast: Autocast
    buffers: dict[str, Tensor]
    modes: list[bool]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=dict)
    arrived: dict[str, float] = field(default_factory=dict)
    passed: dict[str, float] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)
    tasks: dict[int, bool] = field(default_factory=dict)
    passing: set[str] = field(default_factory=set)
    micro_step: int | None = None

    def engine_factor(self) -> float:
        """What the engine's own hooks at the outputs multiplied by, along the way from a loss to the parameters."""
        return math.prod(map(self.factor_at, self.passed))

    def factor_at(self, path: str) -> float:
        """Likewise, at one of them."""
        return self.passed[path] / self.arrived[path] if self.arrived.get(path) else 1.0


class Recorder:
    """Hooks on a module for the length of one window.

    Args:
        module: the user's, live.
        on_failure: told when recording itself fails; the run goes on.
        measures: told when forwards and backwards begin.

    Attributes:
        changed: the first micro-step, from 1, that ran with other parameters than the window's first, and one of them.
        left_over: parameters with a gradient that isn't zero when the first backward begins.
    """

    def __init__(
        self,
        module: nn.Module,
        on_failure: Callable[[Exception], None],
        measures: WindowMeasures | None = None,
    ) -> None:
        self._module, self._failed, self._measures = module, on_failure, measures
        self._forward_of = 0
        self._first_sums: dict[str, int] | None = None
        self._another_stepped = False
        self._sharded = is_sharded(module)  # then its parameters are whole in a forward, and parts in between
        self.changed: tuple[int, str] | None = None
        self.left_over: list[str] = []
        self.forwards: list[Forward] = []
        self._current: list[Forward | None] = []
        self._micro_steps: dict[int, int] = {}
        self.clock: Callable[[], int] = lambda: len(self.calls)
        self.begins: Callable[[int], None] = lambda micro_step: None
        self.calls: list[int] = []
        self._outputs: dict[int, tuple[Forward, str]] = {}
        self._scalars: list[tuple[weakref.ref[Tensor], Forward, str]] = []
        self._handles = [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after),
        ]

    # ``clock`` says which call of the engine's step is to come; ``calls`` which it was for each micro-step. ``begins``
    # is told of each micro-step, from 1, before its first forward.

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

    def another_stepped(self) -> None:
        """An optimizer of another model: what came so far was for it, if the gradients that it left get cleared."""
        self._another_stepped = bool(self.calls)

    def _begin_anew(self) -> None:
        self.forwards = [forward for forward in self.forwards if forward.micro_step is None]
        self._micro_steps, self.calls, self._forward_of = {}, [], 1
        if self._measures is not None:
            self._measures.give_up("another model is trained in between, through this one")

    def _before(self, module: nn.Module, arguments: Any, keywords: Any) -> None:
        self._current.append(None)
        if not torch.is_grad_enabled() or _is_compiling():
            return
        try:
            self._forward_begins()
            device = next((p.device for p in module.parameters()), torch.device("cpu"))
            with aside():
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

    def _forward_begins(self) -> None:
        """A micro-step begins with the first forward after a backward."""
        if self._forward_of > len(self.calls):
            return
        self._forward_of = len(self.calls) + 1
        if self._measures is not None:
            self._measures.forward_begins(self._forward_of)
        with aside():
            self.begins(self._forward_of)
            self._look_at_parameters()

    def _look_at_parameters(self) -> None:
        """By value: a swap through ``.data`` counts no version up, and weights swapped back are the same again."""
        if self.changed is not None or self._sharded:
            return
        sums = {name: checksum(p) for name, p in self._module.named_parameters()}
        if self._first_sums is None:
            self._first_sums = sums
        differing = [name for name, own in sums.items() if self._first_sums.get(name) != own]
        if differing:
            self.changed = (self._forward_of, differing[0])

    def _after(self, module: nn.Module, arguments: Any, output: Any) -> None:
        forward = self._current.pop() if self._current else None
        if forward is None or not self._handles:
            return
        try:
            self.forwards.append(forward)
            self._outputs = {}
            for path, tensor in leaves(output).items():
                self._outputs[id(tensor)] = (forward, path)
                with aside():
                    forward.norms[path] = norm_of(tensor)
                if tensor.numel() == 1:
                    self._scalars.append((weakref.ref(tensor), forward, path))
                tensor.register_hook(partial(self._arrived, forward, path))
        except Exception as error:
            self._failed(error)

    def passed_on(self, output: Any) -> None:
        """The engine has hung its own hooks on the outputs; called before the script gets them."""
        try:
            for tensor in leaves(output).values():
                if id(tensor) in self._outputs:
                    forward, path = self._outputs[id(tensor)]
                    forward.passing.add(path)
                    tensor.register_hook(partial(self._passed, forward, path))
            self._outputs = {}
        except Exception as error:
            self._failed(error)

    def scalar_output(self, loss: Any) -> Callable[[], float] | None:
        """Where ``loss`` is a module's own output: asks for the gradient that arrived at it, once it has."""
        for tensor, forward, path in self._scalars:
            if tensor() is loss:
                return lambda: forward.arrived.get(path, 1.0)
        return None

    def _arrived(self, forward: Forward, path: str, gradient: Tensor | None) -> None:
        try:
            if gradient is None:
                return
            task = int(torch._C._current_graph_task_id())
            forward.tasks[task] = torch.is_grad_enabled()
            if forward.micro_step is None:
                if task not in self._micro_steps:
                    if self._another_stepped:
                        self._another_stepped = False
                        with aside():
                            cleared = not self._with_gradients()
                        if cleared:
                            self._begin_anew()
                    self._micro_steps[task] = len(set(self._micro_steps.values()))
                    if not self.calls:
                        with aside():
                            self.left_over = self._with_gradients()
                    self.calls.append(self.clock())
                    if self._measures is not None:
                        self._measures.backward_begins(len(self.calls))
                forward.micro_step = self._micro_steps[task]
            else:
                self._micro_steps.setdefault(task, forward.micro_step)
            with aside():
                forward.arrived[path] = forward.arrived.get(path, 0.0) + norm_of(gradient)
                if path not in forward.passing:
                    self._keep(forward, path, gradient)
        except Exception as error:
            self._failed(error)

    def _with_gradients(self) -> list[str]:
        named = self._module.named_parameters()
        return [name for name, p in named if p.grad is not None and norm_of(p.grad) != 0]

    def _passed(self, forward: Forward, path: str, gradient: Tensor | None) -> None:
        try:
            if gradient is not None:
                with aside():
                    forward.passed[path] = forward.passed.get(path, 0.0) + norm_of(gradient)
                    self._keep(forward, path, gradient)
        except Exception as error:
            self._failed(error)

    def _keep(self, forward: Forward, path: str, gradient: Tensor) -> None:
        """A copy; of a large one that comes from the module's own loss only the factor: it is computed again."""
        from_own_loss = any(known.numel() == 1 for known in forward.gradients.values())
        if from_own_loss and gradient.numel() * gradient.element_size() > LARGE_BYTES:
            before, after = forward.arrived[path], forward.passed.get(path, forward.arrived[path])
            forward.factors[path] = after / before if before else 1.0
            return
        copy, known = gradient.detach().clone(), forward.gradients.get(path)
        forward.gradients[path] = copy if known is None else known + copy


def norm_of(tensor: Tensor) -> float:
    """In float64, of this rank's part."""
    values = own_part(tensor.detach())
    if values.layout != torch.strided:
        values = values.to_dense()
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def _is_compiling() -> bool:
    return bool(torch.compiler.is_compiling())
