"""docs/audit.md says what the code says: the ways, the scripts, and matrices that have a row for each way.

Run: pytest -n 0 tests/audit/test_document.py. Not covered: that the matrices are today's (test_whole.py looks at one).
"""

from __future__ import annotations

import re

from dsaccum.audit.ways import WAYS
from dsaccum.cli.outcome import ExitCode
from tests.docs.markdown import REPOSITORY, code, links, section, tables

PAGE = REPOSITORY / "docs/audit.md"


def test_every_way_is_in_the_table() -> None:
    [table] = tables(section(PAGE, "Ways of calling DeepSpeed"))
    assert [code(name)[0] for name, _ in table] == list(WAYS)
    for name, summary in table:
        assert summary.replace("`", "") == WAYS[code(name)[0]].summary


def test_exit_codes() -> None:
    [table] = tables(section(PAGE, "Exit codes"))
    assert [int(number) for number, _ in table] == [code.value for code in ExitCode]


def test_every_script_is_written_up() -> None:
    scripts = {f"deepspeed-faults/{path.name}" for path in (PAGE.parent / "deepspeed-faults").glob("*.py")}
    assert {link for link in links(PAGE) if link.endswith(".py")} == scripts


def test_matrices_are_of_three_versions_and_have_a_row_for_each_way() -> None:
    text = PAGE.read_text(encoding="utf-8")
    matrices = re.findall(r"^ZeRO  +0.*?\n(.*?)\n\n", text, flags=re.DOTALL | re.MULTILINE)
    assert len(matrices) == len(re.findall(r"^tried +deepspeed", text, flags=re.MULTILINE)) == 3
    for matrix in matrices:
        assert [line.split()[0] for line in matrix.splitlines()] == list(WAYS)
