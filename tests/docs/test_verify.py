"""The documents of ``dsaccum verify`` say what the code says: causes, the record's keys, flags, claims, exit codes.

Run: pytest tests/docs/test_verify.py. Not covered: the sentences, and the output that was pasted.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from typing import Any

import typer

from dsaccum.cli.app import app
from dsaccum.cli.outcome import ExitCode
from dsaccum.records import RecordPart
from dsaccum.verification.cases.arguments import LOOPS
from dsaccum.verification.diagnosis.causes import ADVICE, UNKNOWN
from dsaccum.verification.records import parts, record
from dsaccum.verification.subject.faults import FAULTS, OF_RESUMPTION
from tests.docs.markdown import REFERENCE, REPOSITORY, code, prose, section, tables

VERIFY, CAUSES, RECORD = (REPOSITORY / "docs" / name for name in ("verify.md", "causes.md", "record.md"))
PARTS: dict[str, type[RecordPart]] = {
    "Top level": record.VerifyRecord,
    "claims": record.Claims,
    "causes": record.Cause,
    "effective_batch": record.EffectiveBatchRecord,
    "model": record.ModelRecord,
    "resumed": record.ResumedRecord,
    "resumed: split_before": record.SplitRecord,
    "steps": parts.StepRecord,
    "steps: loss": parts.LossRecord,
    "steps: micro_batch_weights": parts.WeightsRecord,
    "steps: gradient": parts.GradientRecord,
    "steps: optimizer_saw": parts.OptimizerSawRecord,
    "steps: update": parts.UpdateRecord,
    "steps: gradient_norm": parts.NormRecord,
    "tensors_off": parts.TensorOff,
    "trajectory": parts.TrajectoryRecord,
    "communication": parts.CommunicationRecord,
    "per_micro_step": parts.MicroStepRecord,
    "memory": parts.MemoryRecord,
    "by_category": parts.MemoryByCategory,
    "runs": parts.MemoryRun,
}
"""Heading in record.md -> model."""


def identifiers(text: str) -> set[str]:
    return set(re.findall(r"^### ([a-z-]+)$", text, flags=re.MULTILINE))


# --- causes ---


def test_every_cause_has_a_section_and_every_section_a_cause() -> None:
    assert identifiers(prose(CAUSES)) == set(ADVICE)


def test_each_section_says_how_it_looks_why_and_what_to_do() -> None:
    for identifier in ADVICE:
        text = section(CAUSES, identifier)
        parts = re.findall(r"^\*\*(.+?)\*\*", text, flags=re.MULTILINE)
        if "Under watch." in parts:
            assert parts.pop(1) == "Under watch.", identifier
        assert parts[:3] == ["How it looks.", "Why.", "Fix."], identifier
        assert parts[3:] in ([], ["Reported."], ["Limits.", "Reported."]), identifier


def test_each_section_says_who_reported_it_or_that_nobody_did() -> None:
    for identifier in FAULTS | OF_RESUMPTION:
        reported = section(CAUSES, identifier).partition("**Reported.**")[2]
        threads = re.findall(
            r"\[([\w.-]+/[\w.-]+)#(\d+)\]\(https://github.com/([\w.-]+/[\w.-]+)/issues/(\d+)\)", reported
        )
        assert threads or "no public report found" in reported, identifier
        assert all(name == linked and number == to for name, number, linked, to in threads), identifier


def test_all_causes_but_the_unknown_can_be_put_in() -> None:
    known = set(FAULTS | OF_RESUMPTION)
    assert set(ADVICE) - known == {UNKNOWN}
    assert known <= set(ADVICE), "a fault that can be put in can be named"


# --- the record ---


def keys_of(part: type[RecordPart]) -> list[str]:
    return [field.serialization_alias or name for name, field in part.model_fields.items()]


def parts_in(annotation: Any) -> Iterator[type[RecordPart]]:
    """Models that an annotation names, wherever in it."""
    if isinstance(annotation, type) and issubclass(annotation, RecordPart):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from parts_in(inner)


def parts_within(whole: type[RecordPart]) -> set[type[RecordPart]]:
    """It and all models inside it, however deep."""
    reached: set[type[RecordPart]] = set()
    ahead = [whole]
    while ahead:
        part = ahead.pop()
        reached.add(part)
        inside = {each for field in part.model_fields.values() for each in parts_in(field.annotation)}
        ahead += inside - reached
    return reached


def test_the_records_keys_are_documented_in_their_order() -> None:
    for heading, part in PARTS.items():
        [table] = tables(section(RECORD, heading))
        assert [code(row[0])[0] for row in table] == keys_of(part), heading
        assert all(len(row) == 3 and row[1] and row[2] for row in table), "each key has a value and a meaning"


def test_no_part_of_the_record_is_left_out() -> None:
    assert parts_within(record.VerifyRecord) == set(PARTS.values())


def test_the_schemas_name() -> None:
    assert f"`{record.VerifyRecord.model_fields['schema_name'].default}`" in section(RECORD, "The verify record")


# --- the command ---


def command_flags() -> list[str]:
    command: Any = typer.main.get_command(app)
    flags = [option for parameter in command.commands["verify"].params for option in parameter.opts]
    return [flag for flag in flags if flag.startswith("--") and flag != "--help"]


def test_flags_are_those_of_the_command() -> None:
    [table] = tables(section(REFERENCE, "The flags of dsaccum verify"))
    assert sorted(code(row[0])[0] for row in table) == sorted(command_flags())


def test_exit_codes() -> None:
    [table] = tables(section(VERIFY, "Verdict and exit codes"))
    assert [int(row[0]) for row in table] == [each.value for each in ExitCode]


def test_claims_are_those_of_the_record() -> None:
    [table] = tables(section(VERIFY, "Claims"))
    assert [code(row[0])[0] for row in table] == keys_of(record.Claims)


def test_loops() -> None:
    [table] = tables(section(VERIFY, "Your own loop"))
    assert [code(row[0])[0] for row in table] == [*LOOPS, "FILE.py:function"]


def test_a_missing_key_would_be_noticed() -> None:
    """Control: the comparison sees a row that is gone, and a model that is hidden in a list."""
    text = section(RECORD, "memory").replace("| `runs`", "| `other`")
    assert [code(row[0])[0] for row in tables(text)[0]] != keys_of(parts.MemoryRecord)
    assert set(parts_in(list[parts.MemoryRun] | None)) == {parts.MemoryRun}
    assert identifiers("### one-two\n### Not an id\n") == {"one-two"}
