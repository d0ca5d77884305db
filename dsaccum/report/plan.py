"""The plan as people read it: what was asked for, the splits of the effective batch, what else fits, what to write."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from dsaccum.planning.record import PlanRecord, SplitRecord, WayRecord
from dsaccum.report.figures import counted, size
from dsaccum.report.layout import RIGHT, WIDTH, WRONG, columns, heading, labelled, listed, print_lines

_PRECISIONS = {"autocast bf16": "autocast", "autocast fp16": "autocast"}


def print_plan(record: PlanRecord) -> None:
    """What fits, and what else would."""
    print_lines(lambda width: plan_lines(record, width=width))


def plan_lines(record: PlanRecord, *, width: int = WIDTH) -> list[Text]:
    """The subject, splits with their peaks, what the largest consists of, other ways, and the answer last."""
    way = record.chosen or record.asked
    return [
        *_subject(record, width),
        *heading("peak memory", f"{_named(way)}, by micro-batch", width=width),
        *_splits(way, record.memory_bytes),
        *heading("at its highest", f"B = {_shown(way).micro_batch}, {_shown(way).phase}", width=width),
        *_parts(way, width),
        *heading("what else", "ckpt: activation checkpointing; bytes per rank and optimizer step", width=width),
        *_others(record),
        *listed("advice", record.advice, width=width),
        Text(),
        *_answer(record, width),
    ]


def _subject(record: PlanRecord, width: int) -> Iterator[Text]:
    model = record.model
    frozen = "" if model.trained == model.parameters else f", {model.trained:,} of them trained"
    yield from labelled("model", f"{model.class_name}, {counted(model.parameters, 'parameter')}{frozen}", width=width)
    yield from labelled("logits", f"{size(model.logits_bytes_per_sample)} a sample in float32", width=width)
    other = "; --device cuda plans for GPUs" if record.device == "cpu" else ""
    yield from labelled(
        "memory", f"{size(record.memory_bytes)} for tensors on each rank, {record.device}{other}", width=width
    )


def _named(way: WayRecord) -> str:
    checkpointing = ", activation checkpointing" if way.activation_checkpointing else ""
    return f"ZeRO {way.zero_stage}, {_PRECISIONS.get(way.precision, way.precision)}{checkpointing}"


def _splits(way: WayRecord, memory: int) -> list[Text]:
    rows: list[list[Text | str]] = [["B", "N", "forward", "backward", "step", "peak", ""]]
    for split in way.splits:
        phases = [size(split.phases[phase].peak_bytes) for phase in ("forward", "backward", "step")]
        verdict = Text("fits", RIGHT) if split.peak_bytes <= memory else Text("does not fit", WRONG)
        rows.append([str(split.micro_batch), str(split.accumulation_steps), *phases, size(split.peak_bytes), verdict])
    return columns(rows, left=frozenset({6}))


def _shown(way: WayRecord) -> SplitRecord:
    return way.best or way.splits[-1]


def _parts(way: WayRecord, width: int) -> Iterator[Text]:
    split = _shown(way)
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
                _PRECISIONS.get(way.precision, way.precision),
                "on" if way.activation_checkpointing else "off",
                *(("-", "-") if best is None else (str(best.micro_batch), str(best.accumulation_steps))),
                Text(f"{size(way.short_bytes)} short", WRONG) if best is None else size(best.peak_bytes),
                f"x{way.price.compute:.2f}" if way.price.compute is not None else "-",
                size(way.price.gradient_bytes),
                size(way.price.parameter_bytes),
            ]
        )
    return columns(rows, left=frozenset({1, 2}))


def _answer(record: PlanRecord, width: int) -> Iterator[Text]:
    batch = record.effective_batch
    if batch is None or record.chosen is None:
        way = record.asked
        text = f"{_named(way)} does not fit at any N: {size(way.short_bytes)} are missing with B = 1"
        yield from labelled("plan", text, width=width, style=WRONG)
        yield from labelled("written", "nothing", width=width)
        return
    equation = (
        f"{_named(record.chosen)}: {counted(batch.world_size, 'rank')} x {counted(batch.accumulation_steps, 'step')} x "
        f"{batch.micro_batch} micro-batch = {batch.total:,}"
    )
    yield from labelled("plan", equation, width=width, style=RIGHT)
    if record.written is not None:
        yield from labelled("written", record.written, width=width)
        launch = f"deepspeed --num_gpus {batch.world_size} launch/train.py"
        run = f"{launch} --deepspeed {record.written} --experiment {record.experiment}"
        yield from labelled("next", run, width=width)
