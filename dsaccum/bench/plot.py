"""A bench as a picture: memory by category and time, over N. Readable in print: hatches beside colours."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from dsaccum.bench.record import BenchRecord, CandidateRecord

_CATEGORIES = {
    "parameter": ("parameters", "#4477aa", ""),
    "optimizer": ("optimizer states", "#66ccee", "////"),
    "gradient": ("gradients", "#228833", "...."),
    "activation": ("activations", "#ccbb44", ""),
    "temporary": ("temporary", "#bbbbbb", "xxxx"),
}
_MIB = 2**20


def draw(record: BenchRecord, path: Path) -> None:
    """Write a PNG, never over another file.

    Raises:
        FileExistsError: something stands at ``path``.
        OSError: it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 3.4), layout="constrained")
    memory, time = figure.subplots(1, 2)
    shown = [each for each in record.candidates if each.memory is not None and each.time is not None]
    _draw_memory(memory, shown)
    _draw_time(time, shown)
    work = record.workload
    figure.suptitle(
        f"E = {record.total} on W = {record.world_size}, {work.model} of {work.parameters:,}, "
        f"{work.sequence_length} tokens, {work.precision}, ZeRO {work.zero_stage}",
        fontsize=8,
    )
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture, metadata=None, pil_kwargs=None)
    with path.open("xb") as file:
        file.write(picture.getvalue())


def _draw_memory(axes: Any, shown: list[CandidateRecord]) -> None:
    places, below = range(len(shown)), [0.0] * len(shown)
    for category, (name, colour, hatch) in _CATEGORIES.items():
        heights = [(getattr(each.memory.by_category, category) or 0) / _MIB for each in shown if each.memory]
        axes.bar(places, heights, bottom=below, label=name, color=colour, hatch=hatch, edgecolor="white", linewidth=0.4)
        below = [bottom + height for bottom, height in zip(below, heights, strict=True)]
    axes.set_ylabel("peak memory of a rank, MiB", fontsize=8)
    axes.legend(fontsize=6, frameon=False)
    _finish(axes, shown)


def _draw_time(axes: Any, shown: list[CandidateRecord]) -> None:
    places = range(len(shown))
    times = [each.time for each in shown if each.time is not None]
    axes.boxplot(
        [time.seconds for time in times], positions=list(places), whis=(5, 95), showfliers=False, widths=0.5,
        medianprops={"color": "black"},
    )  # fmt: skip
    axes.set_ylabel("optimizer step, s (whiskers: 5 to 95 %)", fontsize=8)
    axes.set_ylim(bottom=0)
    _finish(axes, shown)


def _finish(axes: Any, shown: list[CandidateRecord]) -> None:
    labels = [f"{each.accumulation_steps} x {each.micro_batch}" for each in shown]
    axes.set_xticks(range(len(shown)), labels, fontsize=7)
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel("N x B", fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
