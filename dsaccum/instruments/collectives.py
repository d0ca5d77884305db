"""Every collective that a window makes: operation, bytes, class; seen below all names that DeepSpeed may have bound.

A ``TorchDispatchMode`` sees ``c10d`` operations wherever they are called from, backward's hooks included. Names patched
in ``torch.distributed`` miss ZeRO 3, which bound them at import; the profiler counts twice and knows no bytes.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GRADIENT, PARAMETER, CONTROL = "gradient", "parameter", "control"
BACKWARD, UPDATE, ELSEWHERE = "backward", "update", "elsewhere"
NAMESPACES = ("c10d", "_c10d_functional")
CONTROL_ELEMENTS = 16
"""Reductions outside backward of up to this many elements are norms, flags and losses, not gradients."""
REDUCING, MOVING = ("reduce",), ("gather", "broadcast", "scatter")


@dataclass(frozen=True)
class Collective:
    """One operation on this rank.

    ``input_bytes`` is what this rank hands in: the whole tensor for a reduction or broadcast, its part for a gather.
    ``entrance`` is the function of ``deepspeed.comm`` that was called; None where its logger was passed by, as calls
    of ``torch.distributed`` do.
    """

    micro_step: int
    operation: str
    kind: str
    phase: str
    elements: int
    dtype: torch.dtype
    input_bytes: int
    output_bytes: int
    entrance: str | None = None


@dataclass(frozen=True)
class MicroStepTraffic:
    """The sums over one micro-step; ``operations`` counts all classes together."""

    micro_step: int
    operations: dict[str, int] = field(default_factory=dict)
    gradient_bytes: int = 0
    parameter_bytes: int = 0
    control_bytes: int = 0


class CollectiveRecorder:
    """Records every collective while entered.

    The micro-step counts on after each ``engine.step()``; ``micro_step`` sets it by hand where a loop does otherwise.
    Measure window 2: the first one of ZeRO 3 also broadcasts. Measure without gradient capture, which communicates.

    Args:
        engine: the live engine; its ``backward``, ``step`` and ``_take_model_step`` tell the phases apart.

    Attributes:
        operations: in the order in which they were called.
        now: the micro-step that is under way, from 1.
        step_calls: how often ``engine.step()`` returned.
        optimizer_steps: the micro-steps, from 1, in which the optimizer stepped.
    """

    def __init__(self, engine: Any) -> None:
        self.operations: list[Collective] = []
        self.now = 1
        self.step_calls = 0
        self.optimizer_steps: list[int] = []
        self._engine = engine
        self._mode = _Spy(self._record)
        self._phase = ELSEWHERE
        self._steps_seen = 1

    def micro_step(self, number: int) -> None:
        """What follows belongs to this micro-step (from 1)."""
        self.now = number
        self._steps_seen = max(self._steps_seen, number)

    def __enter__(self) -> CollectiveRecorder:
        engine = self._engine
        self._saved = {name: engine.__dict__.get(name) for name in ("backward", "step", "_take_model_step")}
        engine.backward = self._in_phase(engine.backward, BACKWARD)
        engine._take_model_step = self._in_phase(engine._take_model_step, UPDATE)
        engine.step = self._counting_on(engine.step)
        self._mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mode.__exit__(kind, error, trace)
        for name, value in self._saved.items():
            if value is None:
                del self._engine.__dict__[name]
            else:
                self._engine.__dict__[name] = value

    def per_micro_step(self) -> list[MicroStepTraffic]:
        """Totals of micro-step 1 to the last one seen."""
        last = max((self._steps_seen, *(operation.micro_step for operation in self.operations)))
        return totals_by_micro_step(self.operations, last)

    def bytes_of(self, kind: str) -> int:
        """Input bytes of one class over everything recorded."""
        return sum(operation.input_bytes for operation in self.operations if operation.kind == kind)

    def _record(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        elements = sum(tensor.numel() for tensor in inputs)
        dtype = inputs[0].dtype if inputs else torch.uint8
        kind = classify(name, elements, dtype, self._phase)
        self.operations.append(
            Collective(
                self.now, name, kind, self._phase, elements, dtype, bytes_of(inputs), bytes_of(outputs), _entrance()
            )
        )

    def _in_phase(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def inside(*arguments: Any, **keywords: Any) -> Any:
            previous, self._phase = self._phase, phase
            if phase == UPDATE:
                self.optimizer_steps.append(self.now)
            try:
                return function(*arguments, **keywords)
            finally:
                self._phase = previous

        return inside

    def _counting_on(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*arguments: Any, **keywords: Any) -> Any:
            result = step(*arguments, **keywords)
            self._steps_seen = max(self._steps_seen, self.now)
            self.step_calls += 1
            self.now += 1
            return result

        return stepped


def totals_by_micro_step(operations: Sequence[Collective], last: int) -> list[MicroStepTraffic]:
    """The sums over each of the micro-steps 1 to ``last``."""
    return [_totals([each for each in operations if each.micro_step == step], step) for step in range(1, last + 1)]


def _totals(here: list[Collective], micro_step: int) -> MicroStepTraffic:
    sums = {
        kind: sum(operation.input_bytes for operation in here if operation.kind == kind)
        for kind in (GRADIENT, PARAMETER, CONTROL)
    }
    names = dict(Counter(operation.operation for operation in here))
    return MicroStepTraffic(micro_step, names, sums[GRADIENT], sums[PARAMETER], sums[CONTROL])


def classify(operation: str, elements: int, dtype: torch.dtype, phase: str) -> str:
    """Gradient, parameter or control traffic, by operation, size, dtype and phase.

    - Integers and booleans are control: overflow flags, sizes, barriers, pickled objects.
    - Floating reductions are gradients within ``engine.backward``, whatever their size. Elsewhere they are gradients
      above 16 elements: a norm or a loss is one number per group; in the optimizer's step nothing else is reduced.
    - Floating gathers, broadcasts and scatters are parameters (after the step at ZeRO 1 and 2, around every use at 3).
    - Everything else (all-to-all between experts, point to point) is control: it is neither.
    """
    if not dtype.is_floating_point:
        return CONTROL
    if any(word in operation for word in REDUCING):
        return GRADIENT if phase == BACKWARD or elements > CONTROL_ELEMENTS else CONTROL
    if any(word in operation for word in MOVING):
        return PARAMETER
    return CONTROL


@contextmanager
def comms_logger_bytes() -> Iterator[dict[str, int]]:
    """The second witness: input bytes per function of ``deepspeed.comm``, as DeepSpeed's own comms logger counts them.

    Filled in as the calls come. What carries no tensor (objects, barriers) has 0 bytes. One for the whole process.
    """
    import deepspeed.comm as comm

    logger = comm.comm.comms_logger
    enabled, everything = logger.enabled, logger.prof_all
    totals: dict[str, int] = {}

    def count(function: str, _name: str, _seconds: float, size: int) -> None:
        totals[function] = totals.get(function, 0) + int(size)

    # The logger's own ``append`` works out a bandwidth: it ends the process at operations that it has no formula for,
    # such as ``all_gather_object``, and divides by a time that may be 0.
    logger.append, logger.enabled, logger.prof_all = count, True, True
    try:
        yield totals
    finally:
        logger.enabled, logger.prof_all = enabled, everything
        del logger.append


class _Spy(TorchDispatchMode):
    """Passes everything on unchanged; reports collectives with their input and output tensors."""

    def __init__(self, report: Callable[[str, list[Tensor], list[Tensor]], None]) -> None:
        super().__init__()
        self._report = report

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if (found := collective_of(func, args, kwargs or {})) is not None:
            self._report(*found)
        return func(*args, **(kwargs or {}))


def collective_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, list[Tensor], list[Tensor]] | None:
    """An operation's name, input and output tensors where it is a collective; None for any other operation."""
    if func.namespace not in NAMESPACES or func._opname.startswith(("wait_tensor", "check_for_nan")):
        return None
    return _plain(func._opname), *_tensors(func, args, kwargs)


def _tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Input and output tensors, by the names in the operation's schema; in-place operations have the same for both."""
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    named.update(kwargs)
    held = {name: [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)] for name, value in named.items()}
    inputs = [tensor for name, tensors in held.items() if not name.startswith("out") for tensor in tensors]
    outputs = [tensor for name, tensors in held.items() if name.startswith("out") for tensor in tensors]
    return inputs, outputs or inputs


def _plain(name: str) -> str:
    """``allreduce_`` as people know it: all_reduce."""
    bare = name.strip("_")
    for prefix in ("all", "reduce_scatter"):
        if bare.startswith(prefix) and not bare.startswith((prefix + "_", "reduce_scatter")):
            bare = f"{prefix}_{bare.removeprefix(prefix)}"
    return bare.replace("_base", "_tensor") if bare.startswith(("reduce_scatter", "all_gather")) else bare


def bytes_of(tensors: list[Tensor]) -> int:
    """Of all elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _entrance() -> str | None:
    """Name of the ``deepspeed.comm`` function on the stack whose wrapper tells the comms logger; None without one."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "log_wrapper" and frame.f_globals.get("__name__") == "deepspeed.comm.comm":
            return str(frame.f_locals["func"].__name__)
        frame = frame.f_back
    return None
