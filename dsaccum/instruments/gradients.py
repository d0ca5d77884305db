"""Gradients, parameters and optimizer states by parameter name: whole, on the CPU, the same at every ZeRO stage.

All ``read_*`` functions are collectives at ZeRO 1 to 3: every rank calls them, at the same place. DeepSpeed's own
accessors return None at ZeRO 0, and abort a rank on Adam's ``step`` elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dsaccum.instruments.adapters import Adapter, adapter_for
from dsaccum.instruments.assembly import assemble


@dataclass(frozen=True)
class Snapshot:
    """What the optimizer works on, at one moment.

    Attributes:
        parameters: as the forward uses them (low precision), frozen ones included.
        masters: what the optimizer steps: fp32 masters, or the trained parameters themselves.
        states: name -> state (``exp_avg``, ``momentum_buffer``, ``sum``, ``step``) -> whole tensor; counts are scalars.
        options: name -> the options of its parameter group (``lr``, ``betas``, ``weight_decay``, ...).
    """

    parameters: dict[str, Tensor]
    masters: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]
    options: dict[str, dict[str, Any]]


@dataclass
class ObservedStep:
    """One boundary: the reduced gradient just before clipping, and the optimizer's world before and after it.

    Attributes:
        gradients: name -> gradient in the dtype that DeepSpeed accumulates in; None where DeepSpeed has none.
        loss_scale: what the gradients are still multiplied with (fp16).
        before: None where ``snapshots`` was off; so is ``after``.
        after: after the step and the scheduler.
        applied: False where DeepSpeed discarded the window.
        optimizer: the optimizer that stepped (not its wrapper).
    """

    gradients: dict[str, Tensor | None]
    loss_scale: float
    before: Snapshot | None
    after: Snapshot | None = None
    applied: bool = True
    optimizer: Any = field(default=None, repr=False)


def read_gradients(engine: Any) -> dict[str, Tensor | None]:
    """The accumulated, reduced gradient of each trained parameter, between the window's last backward and its step.

    Parameters without gradient: None in fp32 at ZeRO 0 before reduction, and with BF16_Optimizer; elsewhere DeepSpeed
    has zeros for them. At a micro-step before the boundary ZeRO 1 to 3 have nothing to show.
    """
    adapter = adapter_for(engine)
    whole = assemble(adapter.gradients(), adapter.shape, engine, sharded=adapter.shards_gradients)
    return {name: whole.get((name, "")) for name in adapter.trained}


def read_parameters(engine: Any) -> dict[str, Tensor]:
    """The parameters that the forward uses, frozen ones included."""
    adapter = adapter_for(engine)
    sharded = engine.zero_optimization_stage() == 3
    return _by_name(assemble(adapter.forward_parameters(), adapter.shape, engine, sharded=sharded), adapter)


def read_masters(engine: Any) -> dict[str, Tensor]:
    """What the optimizer steps: fp32 masters where there are masters, else the trained parameters."""
    adapter = adapter_for(engine)
    return _by_name(assemble(adapter.masters(), adapter.shape, engine, sharded=adapter.shards_masters), adapter)


def read_states(engine: Any) -> dict[str, dict[str, Tensor]]:
    """The optimizer's states of each trained parameter; empty before a first step that makes them lazily."""
    adapter = adapter_for(engine)
    states: dict[str, dict[str, Tensor]] = {name: {} for name in adapter.trained}
    whole = assemble(adapter.states(), adapter.shape, engine, sharded=adapter.shards_masters)
    for (name, key), value in whole.items():
        states[name][key] = value
    return states


def read_options(engine: Any) -> dict[str, dict[str, Any]]:
    """The options of each trained parameter's group, as they are now; no collective."""
    adapter = adapter_for(engine)
    groups = engine.optimizer.param_groups
    names = _group_names(adapter)
    return {
        name: {key: value for key, value in groups[index].items() if key != "params"} for name, index in names.items()
    }


def take_snapshot(engine: Any) -> Snapshot:
    """Parameters, masters, states and options at this moment."""
    return Snapshot(read_parameters(engine), read_masters(engine), read_states(engine), read_options(engine))


@contextmanager
def observe_steps(
    engine: Any, *, snapshots: bool = True, past_engine: Callable[[], None] | None = None
) -> Iterator[list[ObservedStep]]:
    """Inside, every optimizer step that ``engine.step`` takes is observed, whatever loop calls it.

    The seam is ``engine._take_model_step``: reduction is done by then at every stage, clipping is not.

    Args:
        engine: the live engine.
        snapshots: also copy parameters, masters and states before and after each step.
        past_engine: called before each step of the optimizer that isn't the engine's: ``engine.optimizer.step()`` in a
            loop goes past reduction, clipping and the count of micro-steps.
    """
    seen: list[ObservedStep] = []
    inside = False
    take_model_step = engine._take_model_step
    replaced = engine.__dict__.get("_take_model_step")

    base = getattr(engine.optimizer, "optimizer", engine.optimizer)

    def observed(*arguments: Any, **keywords: Any) -> Any:
        nonlocal inside
        scale = float(getattr(engine.optimizer, "loss_scale", None) or 1.0)
        before = take_snapshot(engine) if snapshots else None
        step = ObservedStep(read_gradients(engine), scale, before, optimizer=base)
        skipped = engine.skipped_steps
        inside = True
        try:
            result = take_model_step(*arguments, **keywords)
        finally:
            inside = False
        step.applied = engine.skipped_steps == skipped
        step.after = take_snapshot(engine) if snapshots else None
        seen.append(step)
        return result

    def before_step(*_: Any) -> None:
        if past_engine is not None and not inside:
            past_engine()

    engine._take_model_step = observed
    hook = base.register_step_pre_hook(before_step)
    try:
        yield seen
    finally:
        hook.remove()
        if replaced is None:
            del engine._take_model_step
        else:
            engine._take_model_step = replaced


def _by_name(whole: dict[tuple[str, str], Tensor], adapter: Adapter) -> dict[str, Tensor]:
    return {name: whole[name, ""] for name in adapter.parameters if (name, "") in whole}


def _group_names(adapter: Adapter) -> dict[str, int]:
    """Index of each trained parameter's group, known on every rank although each holds only some pieces."""
    wrapper = adapter.wrapper
    if hasattr(wrapper, "sub_group_to_group_id"):
        groups: list[list[Any]] = [[] for _ in wrapper.param_groups]
        for index, parameters in enumerate(wrapper.fp16_groups):
            groups[wrapper.sub_group_to_group_id[index]] += parameters
    else:
        held = ("bit16_groups", "bf16_groups", "fp16_groups")
        own = [group["params"] for group in wrapper.param_groups]
        groups = next((getattr(wrapper, name) for name in held if hasattr(wrapper, name)), own)
    return {
        adapter.names[id(parameter)]: index
        for index, parameters in enumerate(groups)
        for parameter in parameters
        if id(parameter) in adapter.names and parameter.requires_grad
    }
