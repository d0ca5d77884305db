"""Figures of a training run: what went on over its optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from markupsafe import Markup

from dsaccum.report.html.canvas import FAINT, SERIES, WRONG, figure
from dsaccum.report.train_run import TrainStep

MOST_POINTS = 400
"""Of a curve: more are drawn as so many means, with the span around them."""
Point = tuple[int, float]


def losses(steps: Sequence[TrainStep]) -> Markup:
    """The loss of each step; held-out losses as points; where a step was skipped, a mark at the bottom."""
    trained = [(step.step, step.loss) for step in steps if step.loss is not None]
    held_out = [(step.step, step.held_out_loss) for step in steps if step.held_out_loss is not None]
    skipped = [step.step for step in steps if not step.applied]
    if not trained and not held_out:
        return Markup("")
    with figure(2.6) as (axes, svg):
        _curve(axes, trained, SERIES[0], "training")
        if held_out:
            axes.plot(*zip(*held_out, strict=True), "o", color=SERIES[1], markersize=5, label="held out")
        if skipped:
            low = axes.get_ylim()[0]
            axes.plot(skipped, [low] * len(skipped), "|", color=WRONG, markersize=12, label="skipped", clip_on=False)
        axes.set_ylabel("loss")
        axes.set_xlabel("optimizer step")
        axes.legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1), borderpad=0)
    return svg("Loss over the optimizer steps")


def learning_rate(steps: Sequence[TrainStep]) -> Markup:
    """Over the steps."""
    return _over_steps([(step.step, step.learning_rate) for step in steps], "learning rate")


def gradient_norm(steps: Sequence[TrainStep]) -> Markup:
    """Before clipping, over the steps."""
    return _over_steps([(step.step, step.gradient_norm) for step in steps], "gradient norm", from_zero=True)


def tokens_per_second(steps: Sequence[TrainStep]) -> Markup:
    """Target tokens of each step over its seconds; without the first, which makes everything ready."""
    speeds = [
        (step.step, (step.tokens - before.tokens) / step.seconds if step.seconds else None)
        for before, step in pairwise(steps)
    ]
    return _over_steps(speeds, "tokens/s", from_zero=True)


def _over_steps(points: Sequence[tuple[int, float | None]], label: str, *, from_zero: bool = False) -> Markup:
    known = [(step, value) for step, value in points if value is not None]
    if not known:
        return Markup("")
    with figure(1.5) as (axes, svg):
        _curve(axes, known, SERIES[0], label)
        if from_zero:
            axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.set_ylabel(label)
        axes.set_xlabel("optimizer step")
    return svg(f"{label.capitalize()} over the optimizer steps")


def _curve(axes: Any, points: Sequence[Point], colour: str, label: str) -> None:
    if not points:
        return
    pieces = _pieces(points)
    at = [sum(step for step, _ in piece) / len(piece) for piece in pieces]
    means = [sum(value for _, value in piece) / len(piece) for piece in pieces]
    if len(pieces) < len(points):
        low, high = ([of(value for _, value in piece) for piece in pieces] for of in (min, max))
        axes.fill_between(at, low, high, color=FAINT, alpha=0.5, linewidth=0)
    axes.plot(at, means, color=colour, linewidth=1.6, label=label, marker="." if len(points) == 1 else None)
    axes.margins(x=0.02)
    axes.xaxis.get_major_locator().set_params(integer=True)


def _pieces(points: Sequence[Point]) -> list[Sequence[Point]]:
    """Each by itself, or as many pieces of equal length as may be drawn."""
    length = -(-len(points) // MOST_POINTS)
    return [points[begin : begin + length] for begin in range(0, len(points), length)]
