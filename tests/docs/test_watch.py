"""docs/watch.md: its commands parse, its flags are the flags, its causes are causes, its claims the record's.

Run: pytest tests/docs/test_watch.py. Not covered: the output shown, and the tables of versions and mistakes, which
tests/watch measures again.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from dsaccum.verification.diagnosis.causes import ADVICE
from dsaccum.verification.records.watch import WatchClaims
from dsaccum.watch.arguments import USAGE, parse_arguments
from tests.docs.markdown import REPOSITORY, blocks

WATCH = REPOSITORY / "docs/watch.md"
COMMANDS = [
    line
    for block in blocks("bash")
    for line in block.text.splitlines()
    if "dsaccum.watch" in line and not line.startswith("pip")
]


def first_cells(heading: str) -> list[str]:
    """Of the first table after a line."""
    rows = WATCH.read_text().partition(heading)[2].lstrip().splitlines()
    table = []
    for row in rows:
        if row.startswith("|"):
            table.append(row.split("|")[1].strip().strip("`"))
        elif table:
            break
    return table[2:]


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_parse(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    words = shlex.split(line)
    arguments = parse_arguments(words[words.index("dsaccum.watch") + 1 :])
    assert arguments is not None
    assert arguments.script in ("train.py", "package.train")


def test_flags_are_the_flags() -> None:
    documented = first_cells("working directory and\n`sys.path`.")
    assert set(documented) | {"--help"} == set(re.findall(r"--[a-z-]+", USAGE.partition("flags:")[2]))


def test_claims_are_the_records() -> None:
    assert first_cells("**not applicable**:") == list(WatchClaims.model_fields)


def test_causes_are_causes() -> None:
    text = WATCH.read_text().partition("## Thirteen mistakes")[2].partition("## The method")[0]
    named = set(re.findall(r"`([a-z]+(?:-[a-z]+)+)`", text))
    assert named
    assert named <= ADVICE.keys()
