"""The audit as people read it: a matrix with a letter for each cause, then what the letters mean, then what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from string import ascii_uppercase

from rich.text import Text

from dsaccum.audit.pattern import Pattern, patterns
from dsaccum.audit.record import AuditRecord, CellRecord, CircumstancesRecord, OwnRecord
from dsaccum.report.figures import counted
from dsaccum.report.layout import LABEL, RIGHT, WIDTH, WRONG, columns, heading, labelled, listed, print_lines
from dsaccum.verification.diagnosis.causes import ADVICE, UNKNOWN

_PLAIN = {"right": ("+", "right"), "costly": ("c", "the right update, with more communication than is due"),
          "refused": ("-", "refused by DeepSpeed"), "untested": ("?", "no verdict")}  # fmt: skip


def print_audit(record: AuditRecord) -> None:
    """The matrix, what is wrong and where, the summary, and the user's own config."""
    print_lines(lambda width: audit_lines(record, width=width))


def audit_lines(record: AuditRecord, *, width: int = WIDTH) -> list[Text]:
    """A row for each way of calling DeepSpeed, a column for each precision and ZeRO stage."""
    letters = _letters(record.cells)
    return [
        *(_matrix(record.cells, letters) if record.cells else []),
        *_legend(record.cells, width),
        *_wrong(record.cells, letters, width),
        *_refused(record.cells, width),
        *_untested(record, width),
        *heading("in short", width=width),
        *_summary(record, width),
        *(_own(record.own, width) if record.own is not None else []),
    ]


def _letters(cells: Sequence[CellRecord]) -> dict[str, str]:
    """A capital for each cause, the most frequent first."""
    causes = [cause for cell in cells for cause in cell.causes]
    ranked = sorted(dict.fromkeys(causes), key=lambda cause: (cause == UNKNOWN, -causes.count(cause)))
    return dict(zip(ranked, ascii_uppercase, strict=False))


def _matrix(cells: Sequence[CellRecord], letters: dict[str, str]) -> list[Text]:
    precisions = list(dict.fromkeys(cell.circumstances.precision for cell in cells))
    precisions.sort(key=["fp32", "bf16", "fp16", "autocast"].index)
    stages = sorted({cell.circumstances.zero_stage for cell in cells})
    places = [(precision, stage) for precision in precisions for stage in stages]
    above: list[Text | str] = ["", *(precision if stage == stages[0] else "" for precision, stage in places)]
    header: list[Text | str] = ["ZeRO", *(str(stage) for _, stage in places)]
    rows: list[list[Text | str]] = []
    for way in dict.fromkeys(cell.way for cell in cells):
        row: list[Text | str] = [way]
        for precision, stage in places:
            here = [
                cell
                for cell in cells
                if (cell.way, cell.circumstances.precision, cell.circumstances.zero_stage) == (way, precision, stage)
            ]
            row.append(_signs(here, letters))
        rows.append(row)
    lines = columns([header, *rows], left=frozenset(range(len(header))))
    return [_over(above, [header, *rows]), *lines]


def _over(words: Sequence[Text | str], rows: Sequence[Sequence[Text | str]]) -> Text:
    """Words that may run over the columns to their right."""
    line = ""
    for position, word in enumerate(words):
        at = sum(max(len(row[before]) for row in rows) + 2 for before in range(position))
        line = f"{line:<{at}}{word}" if word else line
    return Text(line, LABEL)


def _signs(cells: Sequence[CellRecord], letters: dict[str, str]) -> Text:
    """Each sign once, what is right first."""
    signs: dict[str, str] = {}
    for cell in cells:
        if cell.outcome == "wrong":
            signs |= dict.fromkeys((letters.get(cause, "Z") for cause in cell.causes), WRONG)
        else:
            signs[_PLAIN[cell.outcome][0]] = ""
    return Text.assemble(*((sign, signs[sign]) for sign in sorted(signs, key="+c-?".find)))


def _legend(cells: Sequence[CellRecord], width: int) -> Iterator[Text]:
    used = {cell.outcome for cell in cells}
    signs = [f"{sign} {meaning}" for outcome, (sign, meaning) in _PLAIN.items() if outcome in used]
    if any(cell.outcome == "wrong" for cell in cells):
        signs.append("a capital: wrong, see there")
    if signs:
        yield Text()
        yield from labelled("", "; ".join(signs), width=width)


def _wrong(cells: Sequence[CellRecord], letters: dict[str, str], width: int) -> Iterator[Text]:
    if letters:
        yield from heading("wrong", "capital, cause, where", width=width)
    for cause, letter in letters.items():
        yield from labelled(f"{letter}", f"{cause}: {_meaning(cause)}", width=width, style=WRONG)
        for pattern in patterns(cells, lambda cell, cause=cause: cause in cell.causes):  # type: ignore[misc]
            yield from labelled("", f"{_where(pattern)} ({counted(pattern.cells, 'cell')})", width=width)
        weights = [(cell.weights, cell) for cell in cells if cause in cell.causes and cell.weights and cause == UNKNOWN]
        for words, group in groupby(sorted(weights, key=lambda pair: pair[0]), key=lambda pair: pair[0]):
            ways = ", ".join(dict.fromkeys(cell.way for _, cell in group))
            yield from labelled("", f"{ways}: {words}", width=width)


def _meaning(cause: str) -> str:
    return ADVICE[cause].summary if cause in ADVICE and cause != UNKNOWN else "no known name"


def _where(pattern: Pattern) -> str:
    """``scaled-backward; ZeRO 1, 2``."""
    return "; ".join(_condition(name, values) for name, values in pattern.conditions.items())


def _condition(name: str, values: tuple[object, ...]) -> str:
    told = ", ".join(map(str, sorted(values) if name == "zero_stage" else values))  # type: ignore[type-var]
    words = {"zero_stage": f"ZeRO {told}", "accumulation_steps": f"N = {told}", "clipping": f"clipping {told}"}
    return words.get(name, told)


def _refused(cells: Sequence[CellRecord], width: int) -> Iterator[Text]:
    """By message; where it depends on nothing but the way and the stage, those two are enough to say."""
    refused = [cell for cell in cells if cell.outcome == "refused"]
    if refused:
        yield from heading("refused", "way and ZeRO stages, DeepSpeed's words", width=width)
    for kind in dict.fromkeys(_kind(cell) for cell in refused):
        here = [cell for cell in refused if _kind(cell) == kind]
        places = []
        for way in dict.fromkeys(cell.way for cell in here):
            stages = sorted({cell.circumstances.zero_stage for cell in here if cell.way == way})
            places.append(f"{way} at ZeRO {', '.join(map(str, stages))}")
        yield from labelled("", f"{'; '.join(places)}: {_shortened(here[0].detail)}", width=width)


def _kind(cell: CellRecord) -> str:
    """Messages that differ in a number alone are one."""
    return re.sub(r"\d+", "", cell.detail)


def _shortened(message: str, most: int = 150) -> str:
    return message if len(message) <= most else f"{message[: most - 3].rstrip()}..."


def _untested(record: AuditRecord, width: int) -> Iterator[Text]:
    reasons = [f"{each.circumstance}: {each.reason}" for each in record.untested]
    reasons += [f"{cell.way}, {in_words(cell.circumstances)}: {cell.detail}" for cell in record.cells
                if cell.outcome == "untested"]  # fmt: skip
    if reasons:
        yield Text()
        yield from listed("untested", reasons, width=width)


def _summary(record: AuditRecord, width: int) -> Iterator[Text]:
    summary = record.summary
    versions = ", ".join(
        f"{name} {record.versions[name]}" for name in ("deepspeed", "torch") if name in record.versions
    )
    if versions:
        yield from labelled("tried", f"{versions}, W = {record.ranks}", width=width)
    told = [f"{summary.right} right"]
    told += [f"{summary.costly} right, with more communication than is due"] if summary.costly else []
    told += [f"{summary.wrong} wrong", f"{summary.refused} refused"]
    told += [f"{summary.untested} without a verdict"] if summary.untested else []
    style = WRONG if summary.wrong else RIGHT
    yield from labelled("cells", f"{summary.cells}: {', '.join(told)}", width=width, style=style)
    if record.elapsed_s is not None:
        yield from labelled("took", f"{record.elapsed_s:.0f} s", width=width)


def in_words(circumstances: CircumstancesRecord) -> str:
    """``ZeRO 1, bf16, AdamW, N = 4, clipping on``."""
    each = circumstances
    return (
        f"ZeRO {each.zero_stage}, {each.precision}, {each.optimizer}, N = {each.accumulation_steps}, "
        f"clipping {each.clipping}"
    )


_JUDGED = {
    True: "a good cell: the plain ways of calling DeepSpeed are right",
    False: "NOT a good cell: a plain way of calling DeepSpeed is not right",
    None: "no verdict on the plain ways of calling DeepSpeed",
}


def _own(own: OwnRecord, width: int) -> Iterator[Text]:
    text = f"{own.file} ({in_words(own.circumstances)}): {_JUDGED[own.good]}"
    yield from labelled("your config", text, width=width, style=RIGHT if own.good else WRONG)
    for outcome in ("wrong", "refused", "untested"):
        here = [cell for cell in own.cells if cell.outcome == outcome]
        told = [f"{cell.way} ({', '.join(cell.causes)})" if cell.causes else cell.way for cell in here]
        if told:
            yield from labelled("", f"{outcome} with it: {', '.join(told)}", width=width)
    yield from listed("", own.substitutions, width=width)
