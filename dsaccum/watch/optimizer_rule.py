"""What the optimizer of a watched script got and did, against the rule that its own settings spell out.

Group by group, since groups differ in their decay; the rule is told from the states that it keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from dsaccum.reference_optimizers import NotRebuilt, Optimizer, StepSettings, rebuild_optimizer
from dsaccum.verification.comparison.update_check import (
    SawCheck,
    UpdateCheck,
    check_optimizer_saw,
    check_update,
    hypothesis_of,
)
from dsaccum.verification.subject.capture import OptimizerStep
from dsaccum.watch.window import RunFacts


def passes_with(step: OptimizerStep | None, facts: RunFacts, offset: int) -> bool:
    """Whether another count of the updates before explains the update."""
    before = facts.updates_before + offset
    update = check_optimizer(step, facts, before)[1] if before >= 0 else None
    return update is not None and update.passed


def clipped(step: OptimizerStep | None, coefficients: Mapping[str, float] | None) -> OptimizerStep | None:
    """With the gradient as the script's own clipping was due to leave it, by what it clipped together."""
    if step is None or coefficients is None:
        return step
    due = {name: g if g is None else g.double() * coefficients.get(name, 1.0) for name, g in step.gradients.items()}
    return replace(step, gradients=due)


def check_optimizer(
    step: OptimizerStep | None, facts: RunFacts, updates_before: int
) -> tuple[SawCheck | None, UpdateCheck | None, str | None]:
    """What reached the optimizer, and what it did: group by group, since groups differ in their decay."""
    if step is None or not step.applied or step.before is None or step.after is None:
        return None, None, "the step was not applied"
    saw = check_optimizer_saw(step, facts.clipping)
    tensors, product, square = [], 0.0, 0.0
    for names, rule in _groups(step, facts):
        if isinstance(rule, NotRebuilt):
            return saw, None, rule.reason
        part = _restricted(step, names)
        settings = StepSettings(rule.learning_rate, rule.betas)
        absent = frozenset(names) - {name for name, g in step.gradients.items() if g is not None}
        before = updates_before + _ahead(part, facts)
        hypothesis = hypothesis_of(step, saw, facts.clipping, settings, before, absent)
        found = check_update(part, rule, hypothesis)
        tensors += found.tensors
        if found.ratio is not None:
            product, square = product + found.ratio, square + 1
    moved = any(each.ratio is not None for each in tensors)
    if not moved:
        return saw, None, "no parameter was due to move: the learning rate is 0"
    return saw, UpdateCheck(tensors, product / square if square else None, moved), None


def _groups(step: OptimizerStep, facts: RunFacts) -> list[tuple[list[str], Optimizer | NotRebuilt]]:
    assert step.before is not None
    grouped: dict[str, tuple[list[str], Mapping[str, Any]]] = {}
    for name in step.before.masters:
        options = step.before.options.get(name, {})
        key = repr(sorted((k, repr(v)) for k, v in options.items() if k not in ("params", "step")))
        count = step.before.states.get(name, {}).get("step")  # what is used for the first time has its own
        grouped.setdefault(f"{key}, {count}", ([], options))[0].append(name)
    return [(names, _rule(_kind(step, options), options)) for names, options in grouped.values()]


def _ahead(part: OptimizerStep, facts: RunFacts) -> int:
    """Of several optimizers that a script steps each has a count of its own; with an engine there is one."""
    assert part.before is not None
    if facts.zero_stage is not None:
        return 0
    states = part.before.states.values()
    counts = [int(state["step"]) for state in states if "step" in state] or ([] if any(states) else [0])
    return max(counts) - facts.updates_before if counts else 0


_KEPT = {
    "Adam": ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "bias_correction", "decoupled_weight_decay"),
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    "Adagrad": ("lr", "lr_decay", "weight_decay", "eps", "maximize"),
}


def _kind(step: OptimizerStep, options: Mapping[str, Any]) -> str:
    """By the states that it keeps, where the options are of the same kind: ``OptimizerStep`` has no optimizer."""
    assert step.before is not None
    assert step.after is not None
    alike = {name for name, own in step.before.options.items() if own.keys() == options.keys()}
    keys = {key for name, state in step.after.states.items() if name in alike for key in state}
    if "exp_avg_sq" in keys:
        # NAdam, RAdam and SparseAdam keep the same states.
        return "Adam" if {"amsgrad", "bias_correction"} & options.keys() and "weight_decay" in options else "unknown"
    if "sum" in keys:
        return "Adagrad"
    return "SGD" if keys <= {"momentum_buffer"} else "unknown"


def _rule(kind: str, options: Mapping[str, Any]) -> Optimizer | NotRebuilt:
    if kind not in _KEPT:
        return NotRebuilt("the optimizer's rule is not known here")
    given = {key: options[key] for key in _KEPT[kind] if options.get(key) is not None}
    if any(isinstance(value, Tensor) for value in given.values()):
        given = {key: float(v) if isinstance(v, Tensor) else v for key, v in given.items()}
    if kind == "Adam":
        given["adam_w_mode"] = bool(given.pop("decoupled_weight_decay", options.get("adam_w_mode", True)))
    if kind == "SGD" and "momentum" not in options:
        return NotRebuilt("the optimizer's rule is not known here")
    return rebuild_optimizer({"type": kind, "params": given})


def _restricted(step: OptimizerStep, names: list[str]) -> OptimizerStep:
    """The same step, of some parameters."""

    def part(snapshot: Any) -> Any:
        return replace(
            snapshot,
            masters={name: snapshot.masters[name] for name in names},
            states={name: snapshot.states.get(name, {}) for name in names},
        )

    return replace(
        step,
        before=part(step.before),
        after=part(step.after),
        gradients={name: step.gradients.get(name) for name in names},
    )
