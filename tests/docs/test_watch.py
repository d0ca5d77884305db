"""docs/watch.md and its record: commands parse, flags are the flags, causes are causes, claims and keys the record's.

Run: pytest tests/docs/test_watch.py. Not covered: the output shown, and the tables of versions and mistakes, which
tests/watch measures again.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from dsaccum.records import RecordPart
from dsaccum.verification.diagnosis.causes import ADVICE
from dsaccum.verification.records import watch as record
from dsaccum.verification.records.watch import WatchClaims
from dsaccum.watch.arguments import USAGE, parse_arguments
from tests.docs import test_verify
from tests.docs.markdown import REPOSITORY, blocks, code, section, tables
from tests.docs.test_verify import CAUSES, RECORD, keys_of, parts_within

WATCH = REPOSITORY / "docs/watch.md"
PARTS: dict[str, type[RecordPart]] = {
    "The watch record": record.WatchRecord,
    "watch: engines": record.WatchedRecord,
    "watch: windows": record.WindowRecord,
    "watch: claims": record.WatchClaims,
    "watch: effective_batch": record.EffectiveBatchAsRun,
    "watch: token_weights": record.TokenWeightsRecord,
    "watch: divided_by": record.DividedBy,
    "watch: memory": record.WindowMemory,
    "watch: memory: per_micro_step": record.MicroStepMemory,
}
"""Heading in record.md -> model; what both records have is documented with the verify record."""
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


def test_causes_that_can_be_named_are_causes() -> None:
    text = section(CAUSES, "Under watch")
    named = set(re.findall(r"`([a-z]+(?:-[a-z]+)+)`", text))
    assert len(named) > 20
    assert named <= ADVICE.keys()


def test_causes_are_causes() -> None:
    text = WATCH.read_text().partition("## Thirteen mistakes")[2].partition("## The method")[0]
    named = set(re.findall(r"`([a-z]+(?:-[a-z]+)+)`", text))
    assert named
    assert named <= ADVICE.keys()


def test_the_records_keys_are_documented_in_their_order() -> None:
    for heading, part in PARTS.items():
        [table] = tables(section(RECORD, heading))
        assert [code(row[0])[0] for row in table] == keys_of(part), heading
        assert all(len(row) == 3 and row[1] and row[2] for row in table), "each key has a value and a meaning"


def test_no_part_of_the_record_is_left_out() -> None:
    assert parts_within(record.WatchRecord) - set(test_verify.PARTS.values()) == set(PARTS.values())


def test_the_schemas_name() -> None:
    name = record.WatchRecord.model_fields["schema_name"].default
    assert f"`{name}`" in section(RECORD, "The watch record")


def test_a_missing_key_would_be_noticed() -> None:
    """Control: the comparison sees a row that is gone, and a model that is hidden in a list."""
    text = section(RECORD, "watch: divided_by").replace("| `ranks`", "| `other`")
    assert [code(row[0])[0] for row in tables(text)[0]] != keys_of(record.DividedBy)
    assert record.TokenWeightsRecord in parts_within(record.WatchRecord)
