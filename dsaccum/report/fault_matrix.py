"""The known faults as a list, and the detection matrix: what verify catches, and what the usual check does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.text import Text

from dsaccum.power.record import CellRecord, FaultsRecord, Outcome, SettingRecord
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
STAGES = range(4)
ONLY_ON_A_GPU = ("loss-scale-not-applied", "loss-scale-not-removed")
"""DeepSpeed refuses fp16 on a CPU, and in no other precision is there a loss scale."""
OF_RESUMPTION = "-not-restored"
"""How those end that only a run shows which goes on from a checkpoint."""


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
    if fault.endswith(OF_RESUMPTION):
        return " (with dsaccum verify --resume DIR alone)"
    return " (in fp16 alone, which needs a GPU: not tried in the matrix of a CPU)" if fault in ONLY_ON_A_GPU else ""


def print_matrix(record: FaultsRecord) -> None:
    """The matrix, the false alarms, then the summary."""
    print_lines(lambda width: matrix_lines(record, width=width))


def matrix_lines(record: FaultsRecord, *, width: int = WIDTH) -> list[Text]:
    """A row for each fault, a column for each ZeRO stage, a letter for each cell tried there."""
    faults = list(dict.fromkeys(cell.fault for cell in record.cells))
    header: list[Text | str] = ["fault", *(f"ZeRO {stage}" for stage in STAGES), "usual check"]
    rows = [header, *(_row(fault, record) for fault in faults)]
    used = {cell.outcome for cell in record.cells}
    return [
        *columns(rows, left=frozenset({0, 1, 2, 3, 4})),
        Text(),
        *(Text(f"{letter} {meaning}") for outcome, (letter, meaning) in LETTERS.items() if outcome in used),
        *_paragraph("to look into", odd_cells(record), width),
        *_paragraph("not tried", never_tried(record), width),
        *listed("false alarms", false_alarms(record), width=width, style=WRONG),
        *heading("in short", width=width),
        *_summary(record, width),
    ]


def in_words(setting: SettingRecord) -> str:
    """``W = 2, N = 3, ZeRO 1, packed rows``."""
    return f"W = {setting.ranks}, N = {setting.accumulation_steps}, ZeRO {setting.zero_stage}, {setting.packing} rows"


def cells_at(record: FaultsRecord, fault: str, stage: int) -> list[CellRecord]:
    """All settings of one ZeRO stage in which a fault was tried."""
    return [cell for cell in record.cells if (cell.fault, cell.setting.zero_stage) == (fault, stage)]


def seen_by_usual_check(record: FaultsRecord, fault: str) -> str:
    """``2 of 5``."""
    cells = [cell for cell in record.cells if cell.fault == fault]
    return f"{sum(cell.usual_check == 'caught' for cell in cells)} of {len(cells)}"


def _row(fault: str, record: FaultsRecord) -> list[Text | str]:
    letters = [_letters(cells_at(record, fault, stage)) for stage in STAGES]
    return [fault, *letters, seen_by_usual_check(record, fault)]


def _letters(cells: list[CellRecord]) -> Text:
    if not cells:
        return Text("-")
    return Text.assemble(*((LETTERS[cell.outcome][0], WRONG if cell.outcome in _BAD else "") for cell in cells))


def odd_cells(record: FaultsRecord) -> list[str]:
    """What a reader wants to look into: all that was not simply named."""
    return [
        f"{cell.fault} ({in_words(cell.setting)}): {cell.outcome}"
        + (f", called {', '.join(cell.causes)}" if cell.causes and cell.outcome != "unnamed" else "")
        + (f"; {cell.detail}" if cell.outcome in ("unnamed", "stopped") else "")
        for cell in record.cells
        if cell.outcome != "named"
    ]


def never_tried(record: FaultsRecord) -> list[str]:
    """Faults that no setting can show; what only some settings cannot, ``-`` says."""
    tried = {cell.fault for cell in record.cells}
    return [f"{each.fault}: {each.reason}" for each in record.not_applicable if each.fault not in tried]


def false_alarms(record: FaultsRecord) -> list[str]:
    """Runs without a fault that are not equivalent."""
    return [
        f"{in_words(each.setting)}: {each.verdict or 'no verdict'} {', '.join(each.causes)}"
        for each in record.clean
        if each.verdict != "equivalent"
    ]


def is_sound(record: FaultsRecord) -> bool:
    """All are caught, none is called by a wrong name, and nothing is found where there is nothing."""
    summary = record.summary
    return summary.caught == summary.cells and not summary.wrongly_named and not summary.false_alarms


def in_short(record: FaultsRecord) -> str:
    """In one sentence."""
    summary = record.summary
    word = "CAUGHT" if is_sound(record) else "NOT SOUND"
    return (
        f"{word}: {summary.caught} of {summary.cells} faults were caught, {summary.rightly_named:.1%} rightly named; "
        f"without a fault: {_alarms(record)}"
    )


def _paragraph(label: str, texts: list[str], width: int) -> Iterator[Text]:
    if texts:
        yield Text()
        yield from listed(label, texts, width=width)


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
    yield from labelled("no fault", _alarms(record), width=width)
    if record.elapsed_s is not None:
        yield from labelled("took", f"{record.elapsed_s:.0f} s", width=width)


def _alarms(record: FaultsRecord) -> str:
    number = record.summary.false_alarms
    alarms = counted(number, "false alarm") if number else "no false alarm"
    return f"{counted(len(record.clean), 'run')}, {alarms}"
