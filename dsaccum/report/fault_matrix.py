"""The known faults as a list, and the detection matrix: what verify catches, and what the usual check does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.text import Text

from dsaccum.power.record import CellRecord, CleanRecord, FaultsRecord, Outcome, SettingRecord
from dsaccum.report.figures import counted
from dsaccum.report.layout import LABEL, RIGHT, WIDTH, WRONG, columns, heading, labelled, listed, print_lines

LETTERS: dict[Outcome, tuple[str, str]] = {
    "named": ("N", "caught, and called by its name"),
    "ambiguous": ("a", "caught, its name among several candidates"),
    "unnamed": ("u", "caught, without a name"),
    "stopped": ("s", "stopped by an error before there was a verdict"),
    "misnamed": ("X", "caught, and called by a wrong name"),
    "missed": ("M", "missed"),
}
_BAD = {"misnamed", "missed"}
ONLY_ON_A_GPU = ("loss-scale-not-applied", "loss-scale-not-removed")
"""DeepSpeed refuses fp16 on a CPU, and in no other precision is there a loss scale."""


def print_faults(summaries: Mapping[str, str]) -> None:
    """Each identifier, and what people do wrong.

    Args:
        summaries: identifier -> summary.
    """
    print_lines(lambda width: fault_lines(summaries, width=width))


def fault_lines(summaries: Mapping[str, str], *, width: int = WIDTH) -> list[Text]:
    """A paragraph for each."""
    paragraphs = [
        [Text(name, LABEL), *labelled("", summary + _where_alone(name), width=width)]
        for name, summary in summaries.items()
    ]
    hint = (
        "dsaccum verify --deepspeed FILE.json --inject FAULT shows what one looks like, FAULT+FAULT two at once; "
        "dsaccum faults --run tries all"
    )
    return [line for paragraph in paragraphs for line in paragraph] + [Text(), *labelled("next", hint, width=width)]


def _where_alone(fault: str) -> str:
    return " (in fp16 alone, which needs a GPU: not tried in the matrix of a CPU)" if fault in ONLY_ON_A_GPU else ""


def print_matrix(record: FaultsRecord) -> None:
    """The matrix, the false alarms, then the summary."""
    print_lines(lambda width: matrix_lines(record, width=width))


def matrix_lines(record: FaultsRecord, *, width: int = WIDTH) -> list[Text]:
    """A row for each fault, a column for each ZeRO stage, a letter for each cell tried there."""
    faults = list(dict.fromkeys(cell.fault for cell in record.cells))
    header: list[Text | str] = ["fault", *(f"ZeRO {stage}" for stage in range(4)), "usual check"]
    rows = [header, *(_row(fault, [cell for cell in record.cells if cell.fault == fault]) for fault in faults)]
    used = {cell.outcome for cell in record.cells}
    return [
        *columns(rows, left=frozenset({0, 1, 2, 3, 4})),
        Text(),
        *(Text(f"{letter} {meaning}") for outcome, (letter, meaning) in LETTERS.items() if outcome in used),
        *_odd_cells(record.cells, width),
        *_never_tried(record, width),
        *_false_alarms(record.clean, width),
        *heading("in short", width=width),
        *_summary(record, width),
    ]


def in_words(setting: SettingRecord) -> str:
    """``W = 2, N = 3, ZeRO 1, packed rows``."""
    return f"W = {setting.ranks}, N = {setting.accumulation_steps}, ZeRO {setting.zero_stage}, {setting.packing} rows"


def _row(fault: str, cells: list[CellRecord]) -> list[Text | str]:
    by_stage = [[cell.outcome for cell in cells if cell.setting.zero_stage == stage] for stage in range(4)]
    caught = sum(cell.usual_check == "caught" for cell in cells)
    return [fault, *map(_letters, by_stage), f"{caught} of {len(cells)}"]


def _letters(outcomes: list[Outcome]) -> Text:
    if not outcomes:
        return Text("-")
    return Text.assemble(*((LETTERS[outcome][0], WRONG if outcome in _BAD else "") for outcome in outcomes))


def _odd_cells(cells: list[CellRecord], width: int) -> Iterator[Text]:
    """What a reader wants to look into: all that was not simply named."""
    texts = [
        f"{cell.fault} ({in_words(cell.setting)}): {cell.outcome}"
        + (f", called {', '.join(cell.causes)}" if cell.causes and cell.outcome != "unnamed" else "")
        + (f"; {cell.detail}" if cell.outcome in ("unnamed", "stopped") else "")
        for cell in cells
        if cell.outcome != "named"
    ]
    if texts:
        yield Text()
        yield from listed("to look into", texts, width=width)


def _never_tried(record: FaultsRecord, width: int) -> Iterator[Text]:
    """Faults that no setting can show; what only some settings cannot, ``-`` says."""
    tried = {cell.fault for cell in record.cells}
    reasons = [f"{each.fault}: {each.reason}" for each in record.not_applicable if each.fault not in tried]
    if reasons:
        yield Text()
        yield from listed("not tried", reasons, width=width)


def _false_alarms(clean: list[CleanRecord], width: int) -> Iterator[Text]:
    alarms = [
        f"{in_words(each.setting)}: {each.verdict or 'no verdict'} {', '.join(each.causes)}"
        for each in clean
        if each.verdict != "equivalent"
    ]
    yield from listed("false alarms", alarms, width=width, style=WRONG)


def _summary(record: FaultsRecord, width: int) -> Iterator[Text]:
    summary = record.summary
    all_caught = summary.caught == summary.cells
    yield from labelled(
        "caught",
        f"{summary.caught} of {summary.cells}; the usual check: {summary.usual_check_caught}",
        width=width,
        style=RIGHT if all_caught else WRONG,
    )
    yield from labelled(
        "rightly named",
        f"{summary.rightly_named:.1%} (one of several candidates counts half), {summary.wrongly_named} by a wrong name",
        width=width,
    )
    alarms = counted(summary.false_alarms, "false alarm") if summary.false_alarms else "no false alarm"
    yield from labelled("no fault", f"{counted(len(record.clean), 'run')}, {alarms}", width=width)
    if record.elapsed_s is not None:
        yield from labelled("took", f"{record.elapsed_s:.0f} s", width=width)
