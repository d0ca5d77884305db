"""Lines of a report: labelled paragraphs and aligned columns that fit 80 characters, with styles for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TextIO

from rich.console import Console
from rich.text import Text

WIDTH: Final = 80
WIDEST: Final = 100
"""Longer lines are hard to read, however wide the terminal is."""
LABEL_WIDTH: Final = 16
"""As in the first lines of a training run."""
WRONG, RIGHT, LABEL, ASIDE = "bold red", "bold green", "bold", "dim"


def labelled(label: str, text: str, *, width: int = WIDTH, style: str = "") -> list[Text]:
    """``label           text``, wrapped with a hanging indent; words such as paths and commands are never broken."""
    lines: list[Text] = []
    for paragraph in text.splitlines() or [""]:
        for words in textwrap.wrap(
            paragraph, max(width - LABEL_WIDTH, 20), break_long_words=False, break_on_hyphens=False
        ) or [""]:
            head = label if not lines else ""
            lines.append(Text.assemble((f"{head:<{LABEL_WIDTH}}", LABEL), (words, style)))
    return lines


def listed(label: str, texts: Iterable[str], *, width: int = WIDTH, style: str = "") -> list[Text]:
    """Several paragraphs under one label, each on a line of its own; nothing at all where there are none."""
    lines: list[Text] = []
    for text in texts:
        lines += labelled("" if lines else label, text, width=width, style=style)
    return lines


def columns(rows: Sequence[Sequence[Text | str]], *, left: frozenset[int] = frozenset()) -> list[Text]:
    """Rows of equal length in columns two blanks apart, aligned to the right but for those in ``left``."""
    cells = [[each if isinstance(each, Text) else Text(each) for each in row] for row in rows]
    widths = [max(len(row[position]) for row in cells) for position in range(len(cells[0]))]
    lines = []
    for row in cells:
        line = Text()
        for position, (cell, width) in enumerate(zip(row, widths, strict=True)):
            blanks = Text(" " * (width - len(cell)))
            line += (cell + blanks if position in left else blanks + cell) + Text("  ")
        line.rstrip()
        lines.append(line)
    return lines


def heading(text: str, aside: str = "", *, width: int = WIDTH) -> list[Text]:
    """An empty line, a title, and what it refers to; on lines of its own where the two don't fit one."""
    if len(text) + 2 + len(aside) <= width:
        return [Text(), Text.assemble((text, LABEL), (f"  {aside}" if aside else "", ASIDE))]
    return [Text(), Text(text, LABEL), *(Text(f"  {line}", ASIDE) for line in textwrap.wrap(aside, width - 2))]


def as_plain_text(lines: Iterable[Text]) -> str:
    """Without styles."""
    return "\n".join(line.plain.rstrip() for line in lines)


def print_lines(lines_of: Callable[[int], Iterable[Text]], stream: TextIO | None = None) -> None:
    """Print lines made for the width that there is, in one write.

    Args:
        lines_of: gives them for a width.
        stream: where to, stdout if left out; colours are used on a terminal only, and not where ``NO_COLOR`` is set.

    Raises:
        OSError: nobody is left to read it.
    """
    console = Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True)
    width = min(max(console.width, WIDTH), WIDEST) if console.is_terminal else WIDTH
    with console.capture() as report:
        for line in lines_of(width):
            console.print(line)
    console.file.write(report.get())
