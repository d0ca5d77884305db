"""The verify record keeps its contract: keys, null for what was not measured, the verdict, files never overwritten.

Run: pytest tests/report/test_record.py -n 0. Not covered: whether the figures in it are right.
"""

from __future__ import annotations

import json
import math
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from dsaccum.verification.records.parts import MOST_TENSORS
from dsaccum.verification.records.record import (
    Cause,
    Claims,
    EffectiveBatchRecord,
    GradientRecord,
    StepRecord,
    TensorOff,
    VerifyRecord,
    verdict_of,
)
from tests.report import records

# Copied to the letter from the contract (section 5 of the design).
CONTRACT = """
{"schema": "dsaccum.verify/1", "verdict": "equivalent" | "not_equivalent", "loop": "dsaccum",
 "claims": {"gradient": "pass|fail|untested|not_applicable", "clipping": "", "update": "", "loss": "", "schedule": "", "samples": "", "replicas": "", "communication": "", "memory": ""},
 "causes": [{"id": "loss-scaled-twice", "confidence": "certain|ambiguous", "summary": "...", "evidence": {...}, "fix": "..."}],
 "effective_batch": {"world_size": 2, "micro_batch": 2, "accumulation_steps": 4, "total": 16},
 "truth": "float64|mixed|float32", "substitutions": ["..."], "remedies": ["..."],
 "steps": [{"step": 1, "applied": true, "learning_rate": 0.0,
    "loss": {"deepspeed": 0.0, "big_batch": 0.0, "truth": 0.0},
    "micro_batch_weights": {"expected": [[N rows of W]], "recovered": [[N rows of W]], "by_rank": [...], "max_error": 0.0, "tolerance": 0.0, "condition": 0.0},
    "gradient": {"error": 0.0, "bound": 0.0, "ratio": 1.0, "residual": 0.0, "yardstick_error": 0.0, "noise": 0.0, "worst_parameter": "..."},
    "optimizer_saw": {"error": 0.0, "bound": 0.0, "ratio": 1.0},
    "update":   {"error": 0.0, "bound": 0.0, "ratio": 1.0, "worst_parameter": "..."},
    "gradient_norm": {"deepspeed": 0.0, "big_batch": 0.0, "clipped": 0.0}}],
 "trajectory": {"max": 0.0, "mean_drift": 0.0, "bound": 0.0},
 "communication": {"per_micro_step": [{"micro_step": 1, "operations": {"all_reduce": 0}, "gradient_bytes": 0, "parameter_bytes": 0, "control_bytes": 0}],
    "expected_gradient_bytes": 0, "only_at_boundary": true, "witnesses": {...}},
 "memory": {"peak_bytes": 0, "by_category": {"parameter": 0, "gradient": 0, "activation": 0, "optimizer": 0, "temporary": 0}, "runs": [{"accumulation_steps": 1, "micro_batch": 16, "peak_bytes": 0}]},
 "versions": {...}, "hardware": {...}, "command": [...], "elapsed_s": 0.0}
"""  # noqa: E501
ADDED = {
    "": {"reasons", "warnings", "unavailable", "precision", "accumulation_dtype", "zero_stage", "model", "experiment",
         "deepspeed_config", "fault", "resumed"},
    "steps.": {"window", "data", "optimizer_steps"},
    "steps.micro_batch_weights.": {"reason"},
    "steps.gradient.": {"tensors_off"},
    "steps.update.": {"tensors_off"},
    "communication.": {"reason"},
    "memory.": {"reason"},
    "memory.runs.": {"by_category"},
}  # fmt: skip
OPEN_MAPPINGS = {"causes.evidence.", "communication.witnesses.", "versions.", "hardware.",
                 "communication.per_micro_step.operations."}  # fmt: skip


def contract() -> dict[str, Any]:
    text = CONTRACT.replace('"equivalent" | "not_equivalent"', '"equivalent"').replace("[[N rows of W]]", "[[0.0]]")
    return json.loads(text.replace("{...}", "{}").replace("[...]", "[]"))


def keys(value: Any, place: str = "") -> dict[str, set[str]]:
    """Keys of every object, by where it stands; lists stand for their first item."""
    if isinstance(value, list):
        return keys(value[0], place) if value else {}
    if not isinstance(value, dict) or place in OPEN_MAPPINGS:
        return {}
    found = {place: set(value)}
    for key, inner in value.items():
        found |= keys(inner, f"{place}{key}.")
    return found


def minimal(**changes: Any) -> VerifyRecord:
    """Nothing was measured."""
    batch = EffectiveBatchRecord(world_size=1, micro_batch=1, accumulation_steps=1, total=1)
    figures = {"verdict": None, "loop": "dsaccum", "claims": Claims(), "effective_batch": batch, **changes}
    return VerifyRecord(**figures)


def strict_json(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in the JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("case", [records.record, records.loss_scaled_twice, records.untested_update,
                                  records.ranks_not_reduced, minimal])  # fmt: skip
def test_round_trip(case: Any, tmp_path: Path) -> None:
    record = case()
    record.write(tmp_path / "record.json")
    assert VerifyRecord.read(tmp_path / "record.json") == record


def test_keys_are_those_of_the_contract_and_what_was_added() -> None:
    written = strict_json(records.loss_scaled_twice().as_json())
    found, promised = keys(written), keys(contract())
    assert set(promised) <= set(found)
    for place, names in promised.items():
        assert found[place] == names | ADDED.get(place, set()), place


def test_keys_are_there_when_nothing_was_measured() -> None:
    written = strict_json(minimal(steps=[StepRecord(step=1)]).as_json())
    promised = keys(contract())
    for place, names in keys(written).items():
        assert names >= promised.get(place, set()), place
    assert written["steps"][0]["gradient"]["error"] is None
    assert written["memory"]["by_category"]["activation"] is None


def test_a_missing_key_would_be_noticed() -> None:
    """Control."""
    written = strict_json(records.loss_scaled_twice().as_json())
    del written["steps"][0]["gradient"]["noise"]
    assert keys(written)["steps.gradient."] != keys(contract())["steps.gradient."] | ADDED["steps.gradient."]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, np.float32("nan"), np.float64("inf")])
def test_what_is_not_finite_becomes_null(number: float) -> None:
    cause = Cause(id="x", confidence="certain", summary="", evidence={"deep": [{"in": number}, 1.5]}, fix="")
    gradient = GradientRecord(error=number, bound=1.0)
    record = minimal(elapsed_s=number, causes=[cause], steps=[StepRecord(step=1, gradient=gradient)],
                     deepspeed_config={"optimizer": {"lr": number}})  # fmt: skip
    written = strict_json(record.as_json())
    assert written["elapsed_s"] is written["steps"][0]["gradient"]["error"] is None
    assert written["causes"][0]["evidence"] == {"deep": [{"in": None}, 1.5]}
    assert written["deepspeed_config"] == {"optimizer": {"lr": None}}
    assert written["steps"][0]["gradient"]["bound"] == 1.0


def test_numbers_of_numpy_are_plain_numbers() -> None:
    cause = Cause(id="x", confidence="certain", summary="", evidence={"weights": np.ones((1, 2))}, fix="")
    assert cause.evidence == {"weights": [[1.0, 1.0]]}


def test_readers_ignore_unknown_keys() -> None:
    written = strict_json(records.record().as_json())
    written["new"] = written["steps"][0]["new"] = written["claims"]["new"] = 1
    assert VerifyRecord.model_validate(written) == records.record()


def test_records_are_frozen() -> None:
    with pytest.raises(ValidationError):
        records.record().loop = "other"


@pytest.mark.parametrize(("gradient", "update"), product(["pass", "fail", "untested", "not_applicable"], repeat=2))
def test_verdict_by_gradient_and_update(gradient: str, update: str) -> None:
    expected = {("pass", "pass"): "equivalent"}.get((gradient, update))
    if "fail" in (gradient, update):
        expected = "not_equivalent"
    others = dict.fromkeys(set(Claims.model_fields) - {"gradient", "update"}, "pass")
    assert verdict_of(Claims(gradient=gradient, update=update, **others)) == expected


@pytest.mark.parametrize("claim", sorted(set(Claims.model_fields) - {"gradient", "update"}))
def test_verdict_by_other_claims(claim: str) -> None:
    """A failure anywhere decides; what was not tested, or does not apply, leaves the verdict alone."""
    claims = dict.fromkeys(Claims.model_fields, "pass")
    assert verdict_of(Claims(**{**claims, claim: "fail"})) == "not_equivalent"
    for state in ("untested", "not_applicable"):
        assert verdict_of(Claims(**{**claims, claim: state})) == "equivalent"


def test_a_verdict_that_contradicts_its_claims_is_refused() -> None:
    with pytest.raises(ValidationError, match="does not follow"):
        minimal(verdict="equivalent")


def test_open_questions_are_substitutions_and_untested_claims() -> None:
    assert records.record().open_questions() == []
    [substituted, untested] = records.loss_scaled_twice().open_questions()
    assert re.match("substituted: FusedAdam", substituted)
    assert re.match("memory is untested: the measurement", untested)
    assert records.untested_update().why_undecided() == (
        "update is untested: there is no reference for the optimizer Lion"
    )


def test_as_many_tensors_are_kept_as_are_of_use() -> None:
    tensors = [TensorOff(name=str(number)) for number in range(MOST_TENSORS + 5)]
    assert [each.name for each in GradientRecord(tensors_off=tensors).tensors_off] == list(map(str, range(20)))


def test_a_record_never_overwrites_a_file(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text("precious")
    with pytest.raises(FileExistsError):
        records.record().write(path)
    assert path.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [path], "nothing is left beside it"


def test_a_record_never_overwrites_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError("no hard links here")

    monkeypatch.setattr("os.link", no_links)
    records.record().write(tmp_path / "record.json")
    with pytest.raises(FileExistsError):
        records.record().write(tmp_path / "record.json")
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_a_record_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text = Path.write_text

    def full_disk(path: Path, text: str, **options: Any) -> int:
        write_text(path, text[:100], **options)
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(OSError, match="no space"):
        records.record().write(tmp_path / "record.json")
    assert list(tmp_path.iterdir()) == []
