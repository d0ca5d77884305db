"""What an optimizer keeps and what its step needs on the way: torch's own classes, run under fake tensors."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from dsaccum.config.errors import ConfigError
from dsaccum.config.optimizer import ADAM_FAMILY
from dsaccum.planning.engines.layout import Device, OptimizerUse
from dsaccum.planning.recorder import Recorder

_FP32 = 4
_STATES_OF_DEEPSPEEDS_OWN: Final = {"adam": 2, "adamw": 2, "lamb": 2, "lion": 1}
"""fp32 tensors per parameter; their kernels work in registers."""
_TAKEN_OUT: Final = ("torch_adam", "adam_w_mode", "fp32_optimizer_states", "bias_correction")
"""By DeepSpeed, before torch sees the rest."""

Use = Callable[[tuple[int, ...]], OptimizerUse]


def is_fused_adam(section: Mapping[str, Any]) -> bool:
    """Whether the JSON's ``optimizer`` is DeepSpeed's own Adam."""
    return section["type"].lower() in ADAM_FAMILY and not section.get("params", {}).get("torch_adam", False)


def optimizer_use(section: Mapping[str, Any], device: Device) -> Use:
    """From the JSON's ``optimizer`` to what it needs for fp32 tensors of so many elements each.

    Raises:
        ConfigError: nothing is known about this optimizer; without a source.
    """
    name, parameters = section["type"], dict(section.get("params", {}))
    if name.lower() in _STATES_OF_DEEPSPEEDS_OWN and not parameters.get("torch_adam", False):
        states = _STATES_OF_DEEPSPEEDS_OWN[name.lower()]
        return lambda sizes: OptimizerUse(_FP32 * states * sum(sizes), 0)
    in_torch = ("AdamW" if parameters.get("adam_w_mode", True) else "Adam") if name.lower() in ADAM_FAMILY else name
    kind: Any = getattr(torch.optim, in_torch, None)
    if not inspect.isclass(kind) or kind is torch.optim.Optimizer:
        known = "Adam, AdamW, Lamb, Lion, or a class of torch.optim"
        raise ConfigError("its memory is not known here", key="optimizer.type", value=name, allowed=known)
    wanted = {key: value for key, value in parameters.items() if key not in _TAKEN_OUT and value != "auto"}
    if device == "cuda" and "foreach" in inspect.signature(kind).parameters:
        wanted = {"foreach": True, **wanted}  # torch's choice on a GPU; on a CPU it steps one tensor after the other
    parameters_text = json.dumps(wanted, sort_keys=True)
    run: Use = functools.partial(_of_torch, kind, parameters_text)  # type: ignore[arg-type]
    return lambda sizes: _of_many(run, sizes, device)


def _of_many(run: Use, sizes: tuple[int, ...], device: Device) -> OptimizerUse:
    """Of any number of tensors, from runs of one or two.

    On a GPU all tensors are stepped together, which needs as much as one of their total size. On a CPU one comes after
    the other, and what the step of one has made is held until the next one's takes its place.
    """
    whole = run((sum(sizes),))
    if device == "cuda" or len(sizes) == 1:
        return whole
    return OptimizerUse(whole.states, max(run(pair).temporary for pair in set(itertools.pairwise(sizes))))


@functools.cache
def _of_torch(kind: Any, parameters_text: str, sizes: tuple[int, ...]) -> OptimizerUse:
    """Of some tensors; many ways of running step the same ones."""
    try:
        return _stepped(kind, json.loads(parameters_text), sizes)
    except DataDependentOutputException:
        problem = "what it keeps depends on more than the number of parameters"
        raise ConfigError(problem, key="optimizer.type", value=kind.__name__, fix='write "AdamW"') from None


def _stepped(kind: Any, parameters: dict[str, Any], sizes: tuple[int, ...]) -> OptimizerUse:
    with FakeTensorMode():
        tensors = [nn.Parameter(torch.empty(size)) for size in sizes]
        for tensor in tensors:
            tensor.grad = torch.empty_like(tensor)
        optimizer = kind(tensors, **parameters)
        recorder = Recorder([*tensors, *(tensor.grad for tensor in tensors if tensor.grad is not None)])
        with recorder:
            optimizer.step()
            states = recorder.alive
            recorder.events.clear()
            optimizer.step()
        return OptimizerUse(states, int(recorder.recorded().alive.max()) - states)
