"""docs/doctor.md says what the code says: every finding, the record's keys, the exit codes, the versions.

Run: pytest tests/doctor/test_document.py -n 0. Not covered: the sentences, and the output that was pasted.
"""

from __future__ import annotations

import ast

from dsaccum.cli.outcome import ExitCode
from dsaccum.doctor.known_versions import KNOWN_FAULTS
from dsaccum.doctor.record import DoctorRecord, FindingRecord
from tests.docs.markdown import REPOSITORY, code, section, tables

DOCUMENT = REPOSITORY / "docs/doctor.md"


def rows(heading: str) -> list[list[str]]:
    [table] = tables(section(DOCUMENT, heading))
    return table


def names_in_code() -> set[tuple[str, str]]:
    """Name and state of every finding, as the source has them; a state that is worked out counts as both."""
    found = set()
    for path in (REPOSITORY / "dsaccum/doctor").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding":
                name, state = node.args[0], node.args[2] if len(node.args) > 2 else ast.Constant("ok")
                if isinstance(name, ast.Constant):
                    states = {each.value for each in ast.walk(state) if isinstance(each, ast.Constant)}
                    found |= {(name.value, each) for each in states & {"ok", "note", "problem"}}
    return found


def test_all_that_is_looked_at_is_listed() -> None:
    listed = {code(row[0])[0] for row in rows("What it looks at")}
    assert listed >= {name for name, state in names_in_code() if state == "ok"}


def test_every_problem_and_every_note_has_a_row_with_its_fix() -> None:
    for heading, state in (("Problems", "problem"), ("Notes", "note")):
        table = rows(heading)
        assert {name for row in table for name in code(row[0])} >= {
            name for name, each in names_in_code() if each == state
        }
        assert all(len(row) == 4 and all(row) for row in table)


def test_versions_that_are_known_to_be_wrong() -> None:
    text = section(DOCUMENT, "Problems")
    for fault in KNOWN_FAULTS:
        assert f"{fault.first} to {fault.last}" in text
        assert fault.explained.removeprefix("docs/") in text


def test_the_records_keys() -> None:
    for heading, part in (("The record", DoctorRecord), ("findings", FindingRecord)):
        keys = [field.serialization_alias or name for name, field in part.model_fields.items()]
        assert [code(row[0])[0] for row in rows(heading)] == keys


def test_exit_codes() -> None:
    assert [int(row[0]) for row in rows("Exit codes")] == [each.value for each in ExitCode]


def test_a_finding_without_a_row_would_be_noticed() -> None:
    """Control: findings are found in the source, with their states."""
    assert {("stale lock", "problem"), ("lock", "note"), ("GPUs", "ok"), ("GPUs", "problem")} <= names_in_code()
    assert ("stale lock", "note") not in names_in_code()
