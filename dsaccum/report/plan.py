"""The plan as people read it: what was asked for, the splits of the effective batch, what else fits, what to write."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from dsaccum.planning.record import PlanRecord, SplitRecord, WayRecord
from dsaccum.report.figures import NOT_MEASURED, counted, size
from dsaccum.report.layout import RIGHT, WIDTH, WRONG, columns, heading, labelled, listed, print_lines

PHASES = ("forward", "backward", "step")
_PRECISIONS = {"autocast bf16": "autocast", "autocast fp16": "autocast"}


def print_plan(record: PlanRecord) -> None:
    """What fits, and what else would."""
    print_lines(lambda width: plan_lines(record, width=width))


def plan_lines(record: PlanRecord, *, width: int = WIDTH) -> list[Text]:
    """The subject, splits with their peaks, what the largest consists of, other ways, and the answer last."""
    way = planned(record)
    highest = shown(way)
    return [
        *_subject(record, width),
        *heading("peak memory", f"{named(way)}, by micro-batch", width=width),
        *_splits(way, record.memory_bytes),
        *heading("at its highest", f"B = {highest.micro_batch}, {highest.phase}", width=width),
        *_parts(highest, width),
        *heading("what else", "ckpt: activation checkpointing; bytes per rank and optimizer step", width=width),
        *_others(record),
        *listed("advice", record.advice, width=width),
        Text(),
        *_answer(record, width),
    ]


def in_short(record: PlanRecord) -> str:
    """What it comes down to, in one sentence."""
    if record.chosen is None:
        nearest = nearest_that_fits(record)
        else_ = "none of the other ways fits" if nearest is None else f"{named(nearest)} would fit"
        lacks = f"{named(record.asked)} lacks {size(record.asked.short_bytes)} on each rank, even with B = 1"
        return f"DOES NOT FIT: {lacks}; {else_}"
    peak = f"{size(shown(record.chosen).peak_bytes)} of {size(record.memory_bytes)} on each rank"
    return f"FITS: {equation(record)}; {peak}"


def planned(record: PlanRecord) -> WayRecord:
    """The way that the plan takes, or, where nothing fits, the one that was asked for."""
    return record.chosen or record.asked


def nearest_that_fits(record: PlanRecord) -> WayRecord | None:
    """Of the other ways, that with the fewest changes."""
    return next((way for way in record.others if way.fits), None)


def named(way: WayRecord) -> str:
    """``ZeRO 1, fp32, activation checkpointing``."""
    checkpointing = ", activation checkpointing" if way.activation_checkpointing else ""
    return f"ZeRO {way.zero_stage}, {precision(way)}{checkpointing}"


def precision(way: WayRecord) -> str:
    """As short as it is clear."""
    return _PRECISIONS.get(way.precision, way.precision)


def shown(way: WayRecord) -> SplitRecord:
    """The split that is looked at closely: the best one, or the one that needs least."""
    return way.best or way.splits[-1]


def described(record: PlanRecord) -> dict[str, str]:
    """What was planned, by label."""
    model = record.model
    frozen = "" if model.trained == model.parameters else f", {model.trained:,} of them trained"
    return {
        "model": f"{model.class_name}, {counted(model.parameters, 'parameter')}{frozen}",
        "logits": f"{size(model.logits_bytes_per_sample)} a sample in float32",
        "memory": f"{size(record.memory_bytes)} for tensors on each rank, {record.device}",
    }


def equation(record: PlanRecord) -> str:
    """The chosen way, and W x N x B = E; empty where nothing fits."""
    batch = record.effective_batch
    if batch is None or record.chosen is None:
        return ""
    return (
        f"{named(record.chosen)}: {counted(batch.world_size, 'rank')} x {counted(batch.accumulation_steps, 'step')} x "
        f"{batch.micro_batch} micro-batch = {batch.total:,}"
    )


def next_command(record: PlanRecord) -> str:
    """What trains by the JSON that was written; empty where none was."""
    if record.written is None or record.effective_batch is None:
        return ""
    launch = f"deepspeed --num_gpus {record.effective_batch.world_size} launch/train.py"
    return f"{launch} --deepspeed {record.written} --experiment {record.experiment}"


def _subject(record: PlanRecord, width: int) -> Iterator[Text]:
    other = "; --device cuda plans for GPUs" if record.device == "cpu" else ""
    for label, text in described(record).items():
        yield from labelled(label, text + (other if label == "memory" else ""), width=width)


def _splits(way: WayRecord, memory: int) -> list[Text]:
    rows: list[list[Text | str]] = [["B", "N", *PHASES, "peak", ""]]
    for split in way.splits:
        phases = [size(split.phases[phase].peak_bytes) for phase in PHASES]
        verdict = Text("fits", RIGHT) if split.peak_bytes <= memory else Text("does not fit", WRONG)
        rows.append([str(split.micro_batch), str(split.accumulation_steps), *phases, size(split.peak_bytes), verdict])
    return columns(rows, left=frozenset({6}))


def _parts(split: SplitRecord, width: int) -> Iterator[Text]:
    parts = split.phases[split.phase].by_category
    told = [f"{name} {size(amount)}" for name, amount in sorted(parts.items(), key=lambda part: -part[1]) if amount]
    yield from labelled("", ", ".join(told), width=width)


def _others(record: PlanRecord) -> list[Text]:
    rows: list[list[Text | str]] = [["ZeRO", "precision", "ckpt", "B", "N", "peak", "compute", "reduced", "gathered"]]
    for way in (record.asked, *record.others):
        best = way.best
        rows.append(
            [
                str(way.zero_stage),
                precision(way),
                "on" if way.activation_checkpointing else "off",
                *(("-", "-") if best is None else (str(best.micro_batch), str(best.accumulation_steps))),
                Text(f"{size(way.short_bytes)} short", WRONG) if best is None else size(best.peak_bytes),
                compute(way),
                size(way.price.gradient_bytes),
                size(way.price.parameter_bytes),
            ]
        )
    return columns(rows, left=frozenset({1, 2}))


def compute(way: WayRecord) -> str:
    """Operations of a sample over those of what was asked for: ``x1.25``."""
    return NOT_MEASURED if way.price.compute is None else f"x{way.price.compute:.2f}"


def _answer(record: PlanRecord, width: int) -> Iterator[Text]:
    if record.chosen is None:
        way = record.asked
        text = f"{named(way)} does not fit at any N: {size(way.short_bytes)} are missing with B = 1"
        yield from labelled("plan", text, width=width, style=WRONG)
        yield from labelled("written", "nothing", width=width)
        return
    yield from labelled("plan", equation(record), width=width, style=RIGHT)
    if record.written is not None:
        yield from labelled("written", record.written, width=width)
        yield from labelled("next", next_command(record), width=width)
