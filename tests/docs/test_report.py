"""The document of ``dsaccum report``: its flags, the records it takes, and pictures of pages that are small.

Run: pytest tests/docs/test_report.py. Not covered: whether the pictures are those of the page as it is now.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer

from dsaccum.cli.app import app
from dsaccum.cli.reading import RECORDS
from tests.docs.markdown import REPOSITORY, code, section, tables

REPORT = REPOSITORY / "docs/report.md"


def test_flags_are_those_of_the_command() -> None:
    command: Any = typer.main.get_command(app)
    flags = [option for parameter in command.commands["report"].params for option in parameter.opts]
    [table] = tables(section(REPORT, "Flags and exit codes"))
    assert {code(row[0])[0] for row in table} == {flag for flag in flags if flag.startswith("--")} - {"--help"}


def test_every_record_that_can_be_given_is_named() -> None:
    [table] = tables(section(REPORT, "What can be given"))
    assert [name for row in table for name in code(row[0])] == list(RECORDS)


@pytest.mark.parametrize(("name", "count"), [("report.md", 2), ("plan.md", 1)])
def test_pictures_are_there_and_small(name: str, count: int) -> None:
    document = REPOSITORY / "docs" / name
    text = document.read_text(encoding="utf-8")
    pictures = re.findall(r"!\[.+\]\((.+\.png)\)", text)
    assert len(pictures) == count
    for picture in pictures:
        assert (document.parent / picture).stat().st_size < 150_000
        assert f"docs/{picture}" in text, "the command that made it"
