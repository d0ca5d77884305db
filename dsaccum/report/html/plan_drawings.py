"""Figures of a plan: the peak of each phase by category, over the micro-batch size B."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from dsaccum.planning.record import PhaseRecord, WayRecord
from dsaccum.report.figures import size
from dsaccum.report.html.canvas import INK, WRONG, figure
from dsaccum.report.html.drawings import stack
from dsaccum.report.plan import PHASES

_CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers", "logits", "data")
_SMALLEST_SEEN = 1 / 300
"""Of the longest bar: a category that is less everywhere would be a name without a colour."""


def phases(way: WayRecord, memory: int) -> Markup:
    """For each split a stacked bar of each phase, with a line where memory ends."""
    bars = [split.phases[phase] for split in way.splits for phase in PHASES]
    if not bars:
        return Markup("")
    with figure(1.0 + 0.2 * len(bars) + 0.1 * len(way.splits)) as (axes, svg):
        places = [-(number + 0.6 * (number // len(PHASES))) for number in range(len(bars))]
        unit = stack(axes, places, _seen(bars), vertical=False)
        axes.axvline(memory / unit, color=INK, linewidth=1.2, linestyle=(0, (4, 2)))
        for place, bar in zip(places, bars, strict=True):
            colour = INK if bar.peak_bytes <= memory else WRONG
            axes.annotate(
                size(bar.peak_bytes), (1, place), (4, 0), xycoords=("axes fraction", "data"),
                textcoords="offset points", va="center_baseline", color=colour,
            )  # fmt: skip
        axes.set_xlim(0, 1.05 * max(memory, *(bar.peak_bytes for bar in bars)) / unit)
        axes.set_ylim(min(places) - 0.6, 0.6)
        first, *further = PHASES
        names = [name for split in way.splits for name in (f"B = {split.micro_batch}, {first}", *further)]
        axes.set_yticks(places, names)
        axes.tick_params(axis="y", length=0)
    return svg("Peak memory of each phase by category, over the micro-batch size")


def _seen(bars: Sequence[PhaseRecord]) -> dict[str, list[int]]:
    least = _SMALLEST_SEEN * max(bar.peak_bytes for bar in bars)
    amounts = {name: [bar.by_category.get(name, 0) for bar in bars] for name in _CATEGORIES}
    return {name: each if max(each) >= least else [0] * len(bars) for name, each in amounts.items()}
