"""What was found, as people read it: a line for each place, a summary, then every fix as a command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from dsaccum.doctor.finding import Finding, State
from dsaccum.report.figures import counted
from dsaccum.report.layout import LABEL, LABEL_WIDTH, RIGHT, WIDTH, WRONG, labelled, print_lines

_STYLES: dict[State, str] = {"ok": "", "note": "", "problem": WRONG}


def print_findings(findings: Sequence[Finding]) -> None:
    """Print them on stdout.

    Raises:
        OSError: nobody is left to read it.
    """
    print_lines(lambda width: finding_lines(findings, width=width))


def finding_lines(findings: Sequence[Finding], *, width: int = WIDTH) -> list[Text]:
    """Table, summary, problems, notes."""
    lines = [line for finding in findings for line in _row(finding, width)]
    lines += [Text(), *_summary(findings, width)]
    for state in ("problem", "note"):
        for finding in findings:
            if finding.state == state:
                lines += _advice(finding, width)
    return lines


def _row(finding: Finding, width: int) -> list[Text]:
    mark = "" if finding.state == "ok" else f"{finding.state}: "
    return labelled(finding.name, mark + finding.found, width=width, style=_STYLES[finding.state])


def _summary(findings: Sequence[Finding], width: int) -> list[Text]:
    problems, notes = (sum(each.state == state for each in findings) for state in ("problem", "note"))
    also = f", {counted(notes, 'note')}" if notes else ""
    if problems:
        return labelled("summary", f"{counted(problems, 'problem')}{also}", width=width, style=WRONG)
    return labelled("summary", f"no problem{also}", width=width, style=RIGHT)


def _advice(finding: Finding, width: int) -> Iterator[Text]:
    """The fix stands on a line of its own, however long, so that it can be copied."""
    yield Text()
    yield from labelled(finding.state, f"{finding.name}: {finding.found}", width=width, style=_STYLES[finding.state])
    yield from labelled("", finding.consequence, width=width)
    if finding.fix:
        yield Text.assemble((f"{'fix':<{LABEL_WIDTH}}", LABEL), finding.fix)
