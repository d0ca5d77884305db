"""Causes that are told by how many micro-batches a window holds, beside what it was to hold or others held."""

from __future__ import annotations

from typing import Any

from dsaccum.verification.diagnosis.named import Named
from dsaccum.watch.claims import weighs
from dsaccum.watch.fixes import REST_OF_AN_EPOCH_FIX, config_without_accumulation
from dsaccum.watch.judge import Judged


def by_count(judged: Judged) -> list[Named]:
    """Another number of micro-batches than somebody was told."""
    facts, first = judged.facts, judged.window.ranks[0]
    held, due = first.micro_batches, facts.accumulation_steps
    if due is None or held == due or (weighs(judged, 1.0) and held < due):
        return []
    shown: dict[str, Any] = {"micro_steps": held, "configured": due, "engine_step_calls": first.step_calls}
    engine = facts.kind == "DeepSpeed"
    says = f"{due} in the config" if engine else f"where {facts.framework} was told {due}"
    detail = f"{held} micro-batches for one update, {says}"
    if not engine and held == 1 and set(facts.earlier_windows) <= {1}:
        return [Named(("step-inside-window",), shown, f"every update is of one micro-batch, {says}")]
    if held < due and weighs(judged, held / due):
        return [Named(("short-window-full-divisor",), shown, detail)]
    if engine and held < due:
        return [Named(("step-inside-window",), shown, detail)]
    if engine:
        detail += ": of them only the last one reached the optimizer" if _only_the_last(judged) else ""
        return [Named(("boundary-shifted",), shown, detail, config_without_accumulation(held) if due == 1 else None)]
    return []


def _only_the_last(judged: Judged) -> bool:
    """Of several micro-steps, on every rank."""
    truth = judged.weighting_truth or judged.way_truth
    for check in judged.weighting or judged.way:
        due, world = truth.due_in_order, len(truth.due[0])
        weighs_nothing = [
            w is not None and abs(w) <= 2 * check.tolerance * max(d, 1 / len(due))
            for w, d in zip(check.recovered.weights, due, strict=True)
        ]
        if not all(weighs_nothing[:-world]) or any(weighs_nothing[-world:]):
            return False
    return judged.window.micro_steps > 1


def one_step_windows(judged: Judged, _: dict[str, str]) -> list[Named]:
    """One micro-batch in the window, and it weighs 1 / k: divided by a number of micro-batches that never come."""
    if judged.window.micro_steps != 1 or judged.weighting is None or judged.tokens is None:
        return []
    if judged.facts.accumulation_steps not in (None, 1) or not judged.tokens.total:
        return []
    k = round(1 / judged.tokens.total)
    tolerance = judged.weighting[0].tolerance
    if k >= 2 and abs(judged.tokens.total * k - 1) <= 2 * tolerance:
        detail = f"every update is of one micro-batch, whose loss is divided by {k}"
        return [Named(("step-inside-window",), {"divided_by": k}, detail)]
    return []


def short_windows(judged: Judged, _: dict[str, str]) -> list[Named]:
    """Fewer micro-steps than a window before, and divided by that window's."""
    before, held = max(judged.facts.earlier_windows, default=0), judged.window.micro_steps
    if held >= before or judged.weighting is None or judged.tokens is None:
        return []
    if weighs(judged, held / before):
        detail = f"{held} micro-batches, each divided by {before}"
        return [Named(("short-window-full-divisor",), {"held": held, "divided_by": before}, detail)]
    return []


def long_windows(judged: Judged, _: dict[str, str]) -> list[Named]:
    """More micro-steps than a window before, and divided by that window's: what an epoch left over is in it, too."""
    held, world = judged.window.micro_steps, len(judged.window.ranks)
    for before in sorted(set(judged.facts.earlier_windows), reverse=True):
        if 1 < before < held and weighs(judged, held / before):
            shown = {"held": held, "divided_by": before}
            detail = f"{held} micro-batches, each divided by {before}, as a window before held"
            if held == before * world:  # a sum over the ranks looks the same
                return [Named(("stale-gradients", "ranks-summed"), shown, detail)]
            detail = f"{held} micro-batches, each divided by {before}: the rest of an epoch went into the next window"
            return [Named(("stale-gradients",), shown, detail, REST_OF_AN_EPOCH_FIX)]
    return []
