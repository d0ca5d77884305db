"""Figures of a report as inline SVG. They hold numbers and words of ours, no text from a record.

Colours are the page's own (CSS variables), so that one drawing serves light, dark and print.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from itertools import count
from typing import Any

from markupsafe import Markup

from dsaccum.report.figures import exceeds
from dsaccum.report.weight_views import WeightView
from dsaccum.verification.records.parts import MemoryRun, MicroStepRecord, StepRecord
from dsaccum.verification.records.watch import TokenWeightsRecord

INK, FAINT, RIGHT, WRONG, NEUTRAL = "#010101", "#020202", "#030303", "#040404", "#050505"
SERIES = ("#050505", "#060606", "#070707", "#080808", "#090909")
"""Stand-ins that matplotlib accepts; the page's variables take their places."""
VARIABLES = {
    INK: "ink", FAINT: "faint", RIGHT: "right", WRONG: "wrong",
    **{stand_in: f"series-{number}" for number, stand_in in enumerate(SERIES, start=1)},
}  # fmt: skip
MOST_BARS = 512
SMALLEST = 1e-4
"""Of error / bound: what is below is drawn there."""
_WIDTH = 6.6
_numbers = count()  # of drawings: no two of a page share an id


def weights(view: WeightView) -> Markup:
    """What each micro-batch weighed, as a bar, and what was due, as a line over it."""
    ranks = view.ranks
    if len(view.due) * ranks > MOST_BARS:
        return Markup("")
    with _figure(2.2) as (axes, svg):
        places = [[row * (ranks + 0.6) + rank for rank in range(ranks)] for row in range(len(view.due))]
        for row, at in enumerate(places):
            for rank, place in enumerate(at):
                found, due = view.found[row][rank], view.due[row][rank]
                if found is not None:
                    axes.bar(place, found, 0.8, color=WRONG if (row, rank) in view.odd else RIGHT)
                if due is not None:
                    axes.plot([place - 0.45, place + 0.45], [due, due], color=INK, linewidth=1.4)
        every = max(1, len(places) // 16)
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
    with _figure(1.8) as (axes, svg):
        axes.bar([low + (n + 0.5) * width for n in range(bins)], counts, width * 0.92, color=NEUTRAL)
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
    with _figure(0.75 + 0.32 * len(rows)) as (axes, svg):
        for place, (_, values) in enumerate(reversed(rows)):
            axes.plot([low, max(values)], [place, place], color=FAINT, linewidth=0.8)
            colours = [WRONG if value > 0 else RIGHT for value in values]
            axes.scatter(values, [place] * len(values), color=colours, s=34, zorder=3)
        axes.axvline(0.0, color=INK, linewidth=1.2, linestyle=(0, (4, 2)))
        axes.set_xlim(low - 0.2, high)
        powers = range(low, high + 1, 1 if high - low <= 8 else 2)
        axes.set_xticks(powers, [f"{10.0**power:g}" for power in powers])
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
    with _figure(0.9 + 0.32 * len(runs)) as (axes, svg):
        places = [float(place) for place in reversed(range(len(runs)))]
        _stack(axes, places, kinds, vertical=False)
        axes.set_yticks(places, [f"N = {run.accumulation_steps}, B = {run.micro_batch}" for run in runs])
    return svg("Peak memory of each split by category")


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
    with _figure(1.9) as (axes, svg):
        _stack(axes, [float(step.micro_step) for step in steps], kinds, vertical=True)
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


def _stack(axes: Any, places: Sequence[float], kinds: dict[str, list[int]], *, vertical: bool) -> None:
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
    axes.legend(frameon=False, ncols=5, loc="lower left", bbox_to_anchor=(0, 1), fontsize=8, handlelength=1)


def _unit(largest: int) -> tuple[str, int]:
    for unit, divisor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if largest >= divisor:
            return unit, divisor
    return "bytes", 1


@contextmanager
def _figure(height: float) -> Iterator[tuple[Any, Callable[[str], Markup]]]:
    """Axes to draw on, and what gives the SVG afterwards. A script's own settings and figures are not touched."""
    import matplotlib  # only a page with figures pays for it
    from matplotlib.figure import Figure

    drawn = StringIO()

    def svg(title: str) -> Markup:
        return _inline(drawn.getvalue(), title)

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**_LOOK, "svg.hashsalt": str(next(_numbers))})
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")  # not pyplot's: it belongs to nobody else
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        yield axes, svg
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(drawn, format="svg", transparent=True, metadata=nothing)


_LOOK: dict[Any, Any] = {
    "svg.fonttype": "none", "font.size": 9.0,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": FAINT, "xtick.color": FAINT, "ytick.color": FAINT,
    "xtick.labelcolor": INK, "ytick.labelcolor": INK,
}  # fmt: skip


def _inline(drawn: str, title: str) -> Markup:
    """As a part of a page, which has its own font and styles."""
    svg = drawn[drawn.index("<svg") :]
    svg = re.sub(r'<g id="[^"]*"| xmlns(:xlink)?="[^"]*"', lambda found: "<g" if found[0][0] == "<" else "", svg)
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)  # it would hold for the whole page
    svg = re.sub(r"font-family: [^;\"]*|(?<=px )'DejaVu Sans'[^;\"]*", "", svg)
    for stand_in, name in VARIABLES.items():
        svg = svg.replace(stand_in, f"var(--{name})")
    return Markup(svg.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1))
