"""Figures of verify, watch and bench: weights, errors over their bounds, collectives, memory and time over N."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from dsaccum.report.figures import exceeds
from dsaccum.report.html.canvas import FAINT, INK, RIGHT, SERIES, WRONG, figure
from dsaccum.report.weight_views import WeightView
from dsaccum.verification.records.parts import MemoryRun, MicroStepRecord, StepRecord, TensorOff
from dsaccum.verification.records.watch import TokenWeightsRecord

MOST_BARS = 512
SMALLEST = 1e-4
"""Of error / bound: what is below is drawn there."""


def weights(view: WeightView) -> Markup:
    """What each micro-batch weighed, as a bar, and what was due, as a line over it."""
    ranks = view.ranks
    if len(view.due) * ranks > MOST_BARS:
        return Markup("")
    with figure(2.2) as (axes, svg):
        places = [[row * (ranks + 0.6) + rank for rank in range(ranks)] for row in range(len(view.due))]
        for row, at in enumerate(places):
            for rank, place in enumerate(at):
                found, due = view.found[row][rank], view.due[row][rank]
                if found is not None:
                    axes.bar(place, found, 0.8, color=WRONG if (row, rank) in view.odd else RIGHT)
                if due is not None:
                    axes.plot([place - 0.45, place + 0.45], [due, due], color=INK, linewidth=1.4)
        every = max(1, len(places) // 10)
        shown = range(0, len(places), every)
        axes.set_xticks([sum(places[row]) / ranks for row in shown], [str(row + 1) for row in shown])
        axes.set_xlabel("micro-step" + (f"; in each, ranks 0 to {ranks - 1}" if ranks > 1 else ""))
        axes.set_ylabel("weight")
        axes.axhline(0, color=FAINT, linewidth=0.6)
    return svg("Weight of each micro-batch, with what was due as a line over it")


def token_histogram(tokens: TokenWeightsRecord, bins: int = 61) -> Markup:
    """How many target tokens weigh what, over what is due.

    Bins are made anew: where all tokens weigh the same, the record's span nothing but rounding. Their number is odd, so
    that 1 is not at the edge of one where all is right.
    """
    held = [(edge, number) for edge, number in tokens.histogram if edge is not None and number]
    if not held:
        return Markup("")
    low, high = min(1.0, held[0][0]), max(1.0, held[-1][0])
    margin = max((high - low) * 0.1, 0.05)
    low, high = low - margin, high + margin
    width = (high - low) / bins
    counts = [0] * bins
    for edge, number in held:
        counts[min(int((edge - low) / width), bins - 1)] += number
    with figure(1.8) as (axes, svg):
        axes.bar([low + (n + 0.5) * width for n in range(bins)], counts, width * 0.92, color=SERIES[0])
        axes.axvline(1.0, color=INK, linewidth=1.2, linestyle=(0, (4, 2)))
        axes.set_xlim(low, high)
        axes.set_xlabel("weight of a token / what is due (dashed: 1, as due)")
        axes.set_ylabel("target tokens")
    return svg("Histogram of the target tokens' weights over what is due")


def errors(steps: Sequence[StepRecord]) -> Markup:
    """Each error over its bound, a point for each step; what is right of 1 is outside."""
    all_rows = [(label, [_over_bound(*of(step)) for step in steps]) for label, of in _ERRORS.items()]
    measured = [(label, [value for value in values if value is not None]) for label, values in all_rows]
    rows = [(label, values) for label, values in measured if values]
    if not rows:
        return Markup("")
    low = round(math.log10(SMALLEST))
    high = 1 + max(0, *(math.ceil(value) for _, values in rows for value in values))
    with figure(0.75 + 0.32 * len(rows)) as (axes, svg):
        for place, (_, values) in enumerate(reversed(rows)):
            axes.plot([low, max(values)], [place, place], color=FAINT, linewidth=0.8)
            colours = [WRONG if value > 0 else RIGHT for value in values]
            axes.scatter(values, [place] * len(values), color=colours, s=34, zorder=3)
        axes.axvline(0.0, color=INK, linewidth=1.2, linestyle=(0, (4, 2)))
        _powers(axes, low, high)
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.set_yticks(range(len(rows)), [label for label, _ in reversed(rows)])
        axes.set_xlabel("error / bound (right of the dashed line: outside)")
    return svg("Each error over its bound")


def traffic(steps: Sequence[MicroStepRecord]) -> Markup:
    """Bytes of each micro-step by kind, stacked."""
    kinds = {
        "gradients": [step.gradient_bytes or 0 for step in steps],
        "parameters": [step.parameter_bytes or 0 for step in steps],
        "control": [step.control_bytes or 0 for step in steps],
    }
    return _by_micro_step(steps, kinds, "Bytes handed to collectives at each micro-step")


def peaks(runs: Sequence[MemoryRun]) -> Markup:
    """The peak of each split by category, stacked."""
    names = ("parameter", "gradient", "activation", "optimizer", "temporary")
    kinds = {name: [getattr(run.by_category, name) or 0 for run in runs] for name in names}
    if not runs or not any(map(any, kinds.values())):
        return Markup("")
    with figure(0.9 + 0.32 * len(runs)) as (axes, svg):
        places = [float(place) for place in reversed(range(len(runs)))]
        stack(axes, places, kinds, vertical=False)
        axes.set_yticks(places, [_split(run) for run in runs])
    return svg("Peak memory of each split by category")


def peaks_of(candidates: Sequence[Any]) -> Markup:
    """The same of a bench's splits."""
    return peaks(
        [
            MemoryRun(
                accumulation_steps=each.accumulation_steps,
                micro_batch=each.micro_batch,
                by_category=each.memory.by_category,
            )
            for each in candidates
            if each.memory is not None
        ]
    )


def times(candidates: Sequence[Any]) -> Markup:
    """Seconds of an optimizer step for each split of a bench: a point for each that was timed, a line at the median."""
    timed = [each for each in candidates if each.time is not None]
    if not timed:
        return Markup("")
    with figure(0.75 + 0.32 * len(timed)) as (axes, svg):
        for place, each in enumerate(reversed(timed)):
            axes.barh(place, each.time.median_s, 0.6, color=SERIES[0], alpha=0.35)
            axes.plot([each.time.median_s] * 2, [place - 0.3, place + 0.3], color=INK, linewidth=1.6)
            axes.scatter(each.time.seconds, [place] * len(each.time.seconds), color=SERIES[0], s=14, zorder=3)
        axes.set_xlim(left=0)
        axes.set_yticks(range(len(timed)), [_split(each) for each in reversed(timed)])
        axes.set_xlabel("seconds of an optimizer step (line: median)")
    return svg("Seconds of an optimizer step for each split")


def tensors(off: Sequence[TensorOff]) -> Markup:
    """Error / bound of each parameter that is off, by its place in the table beneath."""
    worst = [(place, _over_bound(each.error, each.bound)) for place, each in enumerate(off, start=1)]
    known = [(place, value) for place, value in worst if value is not None]
    if not known:
        return Markup("")
    with figure(0.75 + 0.16 * len(off)) as (axes, svg):
        for place, value in known:
            axes.plot([0, value], [place, place], color=WRONG, linewidth=1.6)
            axes.scatter([value], [place], color=WRONG, s=20, zorder=3)
        _powers(axes, 0, max(1, math.ceil(max(value for _, value in known))))
        axes.set_ylim(len(off) + 0.6, 0.4)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.set_ylabel("row")
        axes.set_xlabel("error / bound")
    return svg("Error over its bound, by parameter")


def kept(steps: Sequence[Any]) -> Markup:
    """What is alive before each micro-step of a watched window, and what it adds, stacked."""
    kinds = {
        "alive before": [step.before_bytes or 0 for step in steps],
        "activations": [step.activation_bytes or 0 for step in steps],
    }
    return _by_micro_step(steps, kinds, "Bytes alive at each micro-step")


def _by_micro_step(steps: Sequence[Any], kinds: dict[str, list[int]], title: str) -> Markup:
    if not steps or len(steps) > MOST_BARS or not any(map(any, kinds.values())):
        return Markup("")
    with figure(1.9) as (axes, svg):
        stack(axes, [float(step.micro_step) for step in steps], kinds, vertical=True)
        axes.set_xlabel("micro-step")
        if len(steps) <= 16:
            axes.set_xticks([step.micro_step for step in steps])
    return svg(title)


_ERRORS: dict[str, Callable[[StepRecord], tuple[float | None, float | None]]] = {
    "weights": lambda step: (step.micro_batch_weights.max_error, step.micro_batch_weights.tolerance),
    "gradient": lambda step: (step.gradient.error, step.gradient.bound),
    "optimizer saw": lambda step: (step.optimizer_saw.error, step.optimizer_saw.bound),
    "update": lambda step: (step.update.error, step.update.bound),
}


def _over_bound(error: float | None, bound: float | None) -> float | None:
    """As a power of ten; None where nothing was measured, or it is not finite, which the table says."""
    if error is None or bound is None:
        return None
    if not bound:
        return math.log10(SMALLEST) if not exceeds(error, bound) else None
    return math.log10(max(error / bound, SMALLEST))


def _powers(axes: Any, low: int, high: int) -> None:
    """An axis of powers of ten."""
    powers = range(low, high + 1, -(-(high - low) // 6))
    axes.set_xlim(low - 0.2, high)
    axes.set_xticks(powers, [f"{10.0**power:g}" for power in powers])


def _split(run: Any) -> str:
    return f"N = {run.accumulation_steps}, B = {run.micro_batch}"


def stack(axes: Any, places: Sequence[float], kinds: Mapping[str, Sequence[int]], *, vertical: bool) -> int:
    """Bars of bytes by kind, one kind on the other; returns the bytes of the axis's unit."""
    unit, divisor = _unit(max(map(sum, zip(*kinds.values(), strict=True))))
    below = [0.0] * len(places)
    for colour, (name, amounts) in zip(SERIES, kinds.items(), strict=False):
        if not any(amounts):
            continue
        heights = [amount / divisor for amount in amounts]
        bar = axes.bar if vertical else axes.barh
        bar(places, heights, 0.7, below, color=colour, label=name)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    (axes.set_ylabel if vertical else axes.set_xlabel)(unit)
    axes.legend(
        frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1), borderpad=0, handlelength=1, columnspacing=1.2
    )
    return divisor


def _unit(largest: int) -> tuple[str, int]:
    for unit, divisor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if largest >= divisor:
            return unit, divisor
    return "bytes", 1
