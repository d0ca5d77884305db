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

PLAIN_SIGNS = {"right": ("+", "right"), "costly": ("c", "the right update, with more communication than is due"),
               "refused": ("-", "refused by DeepSpeed"), "untested": ("?", "no verdict")}  # fmt: skip


def print_audit(record: AuditRecord) -> None:
    """The matrix, what is wrong and where, the summary, and the user's own config."""
    print_lines(lambda width: audit_lines(record, width=width))


def audit_lines(record: AuditRecord, *, width: int = WIDTH) -> list[Text]:
    """A row for each way of calling DeepSpeed, a column for each precision and ZeRO stage."""
    letters = letters_of(record.cells)
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


def letters_of(cells: Sequence[CellRecord]) -> dict[str, str]:
    """A capital for each cause, the most frequent first."""
    causes = [cause for cell in cells for cause in cell.causes]
    ranked = sorted(dict.fromkeys(causes), key=lambda cause: (cause == UNKNOWN, -causes.count(cause)))
    return dict(zip(ranked, ascii_uppercase, strict=False))


def precisions_of(cells: Sequence[CellRecord]) -> list[str]:
    """Those that were tried, in our order."""
    return sorted({cell.circumstances.precision for cell in cells}, key=["fp32", "bf16", "fp16", "autocast"].index)


def stages_of(cells: Sequence[CellRecord]) -> list[int]:
    """ZeRO stages that were tried."""
    return sorted({cell.circumstances.zero_stage for cell in cells})


def signs_of(
    cells: Sequence[CellRecord], way: str, precision: str, stage: int, letters: dict[str, str]
) -> dict[str, str]:
    """The signs of one place of the matrix, each once, what is right first; with the outcome that each stands for."""
    signs: dict[str, str] = {}
    for cell in cells:
        if (cell.way, cell.circumstances.precision, cell.circumstances.zero_stage) != (way, precision, stage):
            continue
        if cell.outcome == "wrong":
            signs |= {letters.get(cause, "Z"): "wrong" for cause in cell.causes}
        else:
            signs[PLAIN_SIGNS[cell.outcome][0]] = cell.outcome
    return {sign: signs[sign] for sign in sorted(signs, key="+c-?".find)}


def _matrix(cells: Sequence[CellRecord], letters: dict[str, str]) -> list[Text]:
    precisions, stages = precisions_of(cells), stages_of(cells)
    places = [(precision, stage) for precision in precisions for stage in stages]
    above: list[Text | str] = ["", *(precision if stage == stages[0] else "" for precision, stage in places)]
    header: list[Text | str] = ["ZeRO", *(str(stage) for _, stage in places)]
    rows: list[list[Text | str]] = [
        [way, *(_signs(signs_of(cells, way, precision, stage, letters)) for precision, stage in places)]
        for way in dict.fromkeys(cell.way for cell in cells)
    ]
    lines = columns([header, *rows], left=frozenset(range(len(header))))
    return [_over(above, [header, *rows]), *lines]


def _over(words: Sequence[Text | str], rows: Sequence[Sequence[Text | str]]) -> Text:
    """Words that may run over the columns to their right."""
    line = ""
    for position, word in enumerate(words):
        at = sum(max(len(row[before]) for row in rows) + 2 for before in range(position))
        line = f"{line:<{at}}{word}" if word else line
    return Text(line, LABEL)


def _signs(signs: dict[str, str]) -> Text:
    return Text.assemble(*((sign, WRONG if outcome == "wrong" else "") for sign, outcome in signs.items()))


def _legend(cells: Sequence[CellRecord], width: int) -> Iterator[Text]:
    used = {cell.outcome for cell in cells}
    signs = [f"{sign} {meaning}" for outcome, (sign, meaning) in PLAIN_SIGNS.items() if outcome in used]
    if any(cell.outcome == "wrong" for cell in cells):
        signs.append("a capital: wrong, see there")
    if signs:
        yield Text()
        yield from labelled("", "; ".join(signs), width=width)


def _wrong(cells: Sequence[CellRecord], letters: dict[str, str], width: int) -> Iterator[Text]:
    if letters:
        yield from heading("wrong", "capital, cause, where", width=width)
    for cause, letter in letters.items():
        yield from labelled(f"{letter}", f"{cause}: {meaning(cause)}", width=width, style=WRONG)
        for where in places_of(cells, cause):
            yield from labelled("", where, width=width)


def meaning(cause: str) -> str:
    """In one sentence."""
    return ADVICE[cause].summary if cause in ADVICE and cause != UNKNOWN else "no known name"


def places_of(cells: Sequence[CellRecord], cause: str) -> Iterator[str]:
    """``scaled-backward; ZeRO 1, 2 (3 cells)``; of a cause without a name also what the micro-batches weighed."""
    for pattern in patterns(cells, lambda cell: cause in cell.causes):
        yield f"{_where(pattern)} ({counted(pattern.cells, 'cell')})"
    weights = [(cell.weights, cell) for cell in cells if cause in cell.causes and cell.weights and cause == UNKNOWN]
    for words, group in groupby(sorted(weights, key=lambda pair: pair[0]), key=lambda pair: pair[0]):
        ways = ", ".join(dict.fromkeys(cell.way for _, cell in group))
        yield f"{ways}: {words}"


def _where(pattern: Pattern) -> str:
    return "; ".join(_condition(name, values) for name, values in pattern.conditions.items())


def _condition(name: str, values: tuple[object, ...]) -> str:
    told = ", ".join(map(str, sorted(values) if name == "zero_stage" else values))  # type: ignore[type-var]
    words = {"zero_stage": f"ZeRO {told}", "accumulation_steps": f"N = {told}", "clipping": f"clipping {told}"}
    return words.get(name, told)


def refusals(cells: Sequence[CellRecord]) -> Iterator[tuple[str, str]]:
    """Where and with what words; where it depends on nothing but the way and the stage, those two are enough to say."""
    refused = [cell for cell in cells if cell.outcome == "refused"]
    for kind in dict.fromkeys(_kind(cell) for cell in refused):
        here = [cell for cell in refused if _kind(cell) == kind]
        places = []
        for way in dict.fromkeys(cell.way for cell in here):
            stages = sorted({cell.circumstances.zero_stage for cell in here if cell.way == way})
            places.append(f"{way} at ZeRO {', '.join(map(str, stages))}")
        yield "; ".join(places), _shortened(here[0].detail)


def _refused(cells: Sequence[CellRecord], width: int) -> Iterator[Text]:
    found = list(refusals(cells))
    if found:
        yield from heading("refused", "way and ZeRO stages, DeepSpeed's words", width=width)
    for places, message in found:
        yield from labelled("", f"{places}: {message}", width=width)


def _kind(cell: CellRecord) -> str:
    """Messages that differ in a number alone are one."""
    return re.sub(r"\d+", "", cell.detail)


def _shortened(message: str, most: int = 150) -> str:
    return message if len(message) <= most else f"{message[: most - 3].rstrip()}..."


def untested_reasons(record: AuditRecord) -> list[str]:
    """Circumstances that the machine cannot run, and cells without a verdict."""
    reasons = [f"{each.circumstance}: {each.reason}" for each in record.untested]
    return reasons + [f"{cell.way}, {in_words(cell.circumstances)}: {cell.detail}" for cell in record.cells
                      if cell.outcome == "untested"]  # fmt: skip


def _untested(record: AuditRecord, width: int) -> Iterator[Text]:
    if reasons := untested_reasons(record):
        yield Text()
        yield from listed("untested", reasons, width=width)


def tried(record: AuditRecord) -> str:
    """What was tried, if the record says so."""
    named = [f"{name} {record.versions[name]}" for name in ("deepspeed", "torch") if name in record.versions]
    return ", ".join([*named, f"W = {record.ranks}"]) if named else ""


def counts(record: AuditRecord) -> str:
    """``3 right, 3 wrong, 1 refused``."""
    summary = record.summary
    told = [f"{summary.right} right"]
    told += [f"{summary.costly} right, with more communication than is due"] if summary.costly else []
    told += [f"{summary.wrong} wrong", f"{summary.refused} refused"]
    told += [f"{summary.untested} without a verdict"] if summary.untested else []
    return ", ".join(told)


def _summary(record: AuditRecord, width: int) -> Iterator[Text]:
    if versions := tried(record):
        yield from labelled("tried", versions, width=width)
    style = WRONG if record.summary.wrong else RIGHT
    yield from labelled("cells", f"{record.summary.cells}: {counts(record)}", width=width, style=style)
    if record.elapsed_s is not None:
        yield from labelled("took", f"{record.elapsed_s:.0f} s", width=width)


def in_short(record: AuditRecord) -> str:
    """In one sentence: of the user's own config where there is one, else of all cells."""
    if record.own is not None:
        words = {True: "GOOD", False: "NOT GOOD", None: "NONE"}
        return f"{words[record.own.good]}: {own_text(record.own)}"
    word = "WRONG" if record.summary.wrong else "RIGHT"
    return f"{word}: of {counted(record.summary.cells, 'cell')}, {counts(record)}"


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


def own_text(own: OwnRecord) -> str:
    """The judgement on the user's own config."""
    return f"{own.file} ({in_words(own.circumstances)}): {_JUDGED[own.good]}"


def own_cells(own: OwnRecord) -> Iterator[str]:
    """``wrong with it: flag (loss-scaled-twice)``."""
    for outcome in ("wrong", "refused", "untested"):
        here = [cell for cell in own.cells if cell.outcome == outcome]
        told = [f"{cell.way} ({', '.join(cell.causes)})" if cell.causes else cell.way for cell in here]
        if told:
            yield f"{outcome} with it: {', '.join(told)}"


def _own(own: OwnRecord, width: int) -> Iterator[Text]:
    yield from labelled("your config", own_text(own), width=width, style=RIGHT if own.good else WRONG)
    for text in own_cells(own):
        yield from labelled("", text, width=width)
    yield from listed("", own.substitutions, width=width)
