"""The documents as data: code blocks, headings, links and tables. It knows the Markdown that we write, no more."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
DOCUMENTS = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
REFERENCE = REPOSITORY / "docs" / "config-reference.md"


@dataclass(frozen=True)
class Block:
    """A fenced code block, and where it stands."""

    document: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.document.relative_to(REPOSITORY)}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """All code blocks in one of the languages."""
    return [block for document in DOCUMENTS for block in _blocks_of(document) if block.language in languages]


def prose(document: Path) -> str:
    """The text without its code blocks."""
    return re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(document: Path) -> set[str]:
    """What a link may name after ``#``: GitHub's spelling of each heading."""
    headings = re.findall(r"^#+ (.+)$", prose(document), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(document: Path) -> list[str]:
    """Targets of all links."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(document))


def section(document: Path, heading: str) -> str:
    """The text under a heading, up to the next one of any level."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", prose(document), flags=re.DOTALL | re.MULTILINE)
    assert found, f"{document.name} has no heading {heading!r}"
    return found[1]


def tables(text: str) -> list[list[list[str]]]:
    """Each table as rows of cells, without its header."""
    found = []
    for rows in re.findall(r"(?:^\|.*\|\n)+", text, flags=re.MULTILINE):
        cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows.splitlines()]
        found.append([[cell.strip("| ") for cell in row] for row in cells[2:]])
    return found


def code(cell: str) -> list[str]:
    """The words in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def _blocks_of(document: Path) -> Iterator[Block]:
    text = document.read_text(encoding="utf-8")
    for found in re.finditer(r"^```(\w+)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
        yield Block(document, text.count("\n", 0, found.start()) + 1, found[1], found[2])
