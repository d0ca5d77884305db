"""A bench in a terminal: what would be run, and what was found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from dsaccum.bench.decision import recommended
from dsaccum.bench.record import BenchRecord, CandidateRecord
from dsaccum.report.figures import NOT_MEASURED, counted, plain, size
from dsaccum.report.layout import LABEL, RIGHT, WIDTH, WRONG, columns, heading, labelled, listed, print_lines

if TYPE_CHECKING:
    from dsaccum.bench.run import Bench

_STYLES = {"accept": RIGHT, "reject": WRONG}
_UPDATES = {"equivalent": "equal", "not_equivalent": "DIFFERS", None: "open"}


def print_plan(prepared: Bench) -> None:
    """What ``--dry-run`` shows."""
    print_lines(lambda width: plan_lines(prepared, width=width))


def plan_lines(prepared: Bench, *, width: int = WIDTH) -> list[Text]:
    """Each split, and how often it is run."""
    case, windows = prepared.whole.case, len(prepared.whole.case.windows)
    rows: list[list[Text | str]] = [["", "N", "B", "E"]]
    rows += [
        ["the JSON's own" if split.accumulation_steps == prepared.configured else "", str(split.accumulation_steps),
         str(split.micro_batch), str(split.total)]
        for split in prepared.splits
    ]  # fmt: skip
    timed = (
        f"{counted(prepared.rounds, 'round')} of {windows} optimizer steps for each, of which the first are not timed"
    )
    return [
        *labelled("would be run", f"on {counted(case.batch.world_size, 'rank')}, {_model(prepared)}", width=width),
        Text(),
        *columns(rows, left=frozenset({0})),
        Text(),
        *labelled("updates", "each verified on the copy that dsaccum verify would take", width=width),
        *labelled("memory", "one optimizer step for each, its rows at full length", width=width),
        *labelled("time", timed, width=width),
        *listed("note", [*prepared.whole.substitutions, *prepared.copy.warnings], width=width),
    ]


def print_bench(record: BenchRecord) -> None:
    """Figures, then the word, then what to do."""
    print_lines(lambda width: bench_lines(record, width=width))


def bench_lines(record: BenchRecord, *, width: int = WIDTH) -> list[Text]:
    """All of it."""
    work = record.workload
    ranks = counted(record.world_size, "rank")
    workload = (
        f"{work.model}, {work.parameters:,} parameters, {work.sequence_length} tokens, {work.precision}, "
        f"ZeRO stage {work.zero_stage}"
    )
    lines = [
        *labelled("effective batch", f"{record.total} samples on {ranks} = {ranks} x N x B", width=width),
        *labelled("workload", workload, width=width),
        *listed("note", [*record.substitutions, *record.warnings], width=width),
        *heading("each split", f"seconds of an optimizer step in {counted(work.rounds, 'round')}", width=width),
        *columns([_HEAD, *(_row(each, record) for each in record.candidates)], left=frozenset({9})),
        *heading("memory at the peak", "of the rank that needs most", width=width),
        *columns([_MEMORY_HEAD, *_memory_rows(record)]),
        Text(),
        *listed("not run", _failures(record), width=width, style=WRONG),
        *labelled("verdict", _verdict(record), width=width, style=_STYLES.get(record.word or "", LABEL)),
        *listed("what helps", record.advice, width=width),
    ]
    if (following := _next(record)) is not None:
        lines += labelled("next", following, width=width)
    return lines


_HEAD: list[Text | str] = ["N", "B", "peak", "added", "median", "P95", "tokens/s", "loss", "update", "word"]
_MEMORY_HEAD: list[Text | str] = [
    "N", "parameters", "optimizer", "gradients", "activations", "temporary", "resident",
]  # fmt: skip


def _row(candidate: CandidateRecord, record: BenchRecord) -> list[Text | str]:
    memory, time, update = candidate.memory, candidate.time, candidate.update
    own = "*" if candidate.accumulation_steps == record.configured_accumulation_steps else ""
    word = candidate.word or ("failed" if candidate.failure else "")
    return [
        f"{own}{candidate.accumulation_steps}",
        str(candidate.micro_batch),
        size(memory.peak_bytes if memory else None),
        size(memory.added_bytes if memory else None),
        f"{time.median_s:.3f}" if time else NOT_MEASURED,
        f"{time.p95_s:.3f}" if time else NOT_MEASURED,
        f"{time.tokens_per_s:,.0f}" if time else NOT_MEASURED,
        plain(candidate.loss, 4),
        _UPDATES[update.verdict] if update else NOT_MEASURED,
        Text(word, _STYLES.get(word, "")),
    ]


def _memory_rows(record: BenchRecord) -> Iterator[list[Text | str]]:
    for candidate in record.candidates:
        if (memory := candidate.memory) is not None:
            parts = memory.by_category
            amounts = (parts.parameter, parts.optimizer, parts.gradient, parts.activation, parts.temporary)
            yield [str(candidate.accumulation_steps), *map(size, amounts), size(memory.resident_bytes)]


def _failures(record: BenchRecord) -> list[str]:
    return [f"N = {each.accumulation_steps}: {each.failure}" for each in record.candidates if each.failure]


def _verdict(record: BenchRecord) -> str:
    return f"{(record.word or 'none').upper()}: {record.reason}"


def _next(record: BenchRecord) -> str | None:
    if record.word != "accept":
        return None
    best = recommended([each for each in record.candidates if each.word == "accept"])
    if best.accumulation_steps == record.configured_accumulation_steps:
        return None
    return f"--accum-steps {best.accumulation_steps} --micro-batch {best.micro_batch} trains that way"


def _model(prepared: Bench) -> str:
    whole = prepared.whole
    tokens = whole.case.experiment.data.sequence_length
    return f"{type(whole.model).__name__}, {whole.parameters:,} parameters, {tokens} tokens, {whole.case.precision}"
