"""The whole audit by pairwise cover, as the command runs it: what is known of DeepSpeed comes out by itself.

Run: pytest -m slow -n 0 tests/audit/test_whole.py (minutes). For DeepSpeed 0.19.8; docs/audit.md shows the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsaccum.cli import main
from dsaccum.cli.outcome import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(1200)]

FACTS = {
    3: ("scale-wrt-gas-false", {0}, {"loss-scaled-twice"}),
    4: ("scaled-backward", {1, 2}, {"loss-scaled-twice"}),
    15: ("short-window", {0, 1, 2, 3}, {"boundary-shifted"}),
    16: ("two-backwards", {1, 2}, {"only-last-micro-batch"}),
    17: ("no-sync", {0, 1}, {"boundary-shifted"}),
}
"""Number in our list of measured facts -> way, ZeRO stages at which it is wrong with N = 4, and the cause."""


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out: Path = tmp_path_factory.mktemp("audit") / "audit.json"
    assert main(["audit", "--json", str(out)]) == ExitCode.NOT_EQUIVALENT
    record: dict[str, Any] = json.loads(out.read_text())
    return record


def cells(audit: dict[str, Any], way: str | None = None, **circumstances: Any) -> Iterator[dict[str, Any]]:
    for cell in audit["cells"]:
        if way in (None, cell["way"]) and circumstances.items() <= cell["circumstances"].items():
            yield cell


@pytest.mark.parametrize("fact", FACTS)
def test_it_reports_what_is_known(audit: dict[str, Any], fact: int) -> None:
    way, stages, causes = FACTS[fact]
    for stage in range(4):
        here = list(cells(audit, way, zero_stage=stage, accumulation_steps=4))
        assert here
        shown = any(causes <= set(cell["causes"]) for cell in here)
        assert shown == (stage in stages), (stage, here)


def test_clipping_that_nobody_asked_for(audit: dict[str, Any]) -> None:
    """Fact 5: at every stage, and nowhere but where the key is absent."""
    for stage in range(4):
        assert any("clipping-mismatch" in cell["causes"] for cell in cells(audit, zero_stage=stage, clipping="absent"))
    for clipping in ("off", "on"):
        assert not any("clipping-mismatch" in cell["causes"] for cell in cells(audit, clipping=clipping))


def test_adam_counts_one_too_many_in_bf16_at_zero_0_alone(audit: dict[str, Any]) -> None:
    """Fact 8."""
    counted = [cell["circumstances"] for cell in cells(audit) if "optimizer-count-offset" in cell["causes"]]
    assert counted
    assert {(each["zero_stage"], each["precision"], each["optimizer"]) for each in counted} == {(0, "bf16", "AdamW")}


def test_the_plain_loop_is_right_otherwise(audit: dict[str, Any]) -> None:
    """Control: no false alarm."""
    for way in ("own-loss", "outside-loss", "boundary-override", "unmanaged", "checkpointing", "frozen"):
        for cell in cells(audit, way):
            circumstances = cell["circumstances"]
            excused = circumstances["clipping"] == "absent" or (
                circumstances["zero_stage"] == 0 and circumstances["precision"] == "bf16"
            )
            assert excused or cell["outcome"] == "right", cell


def test_everything_has_a_verdict(audit: dict[str, Any]) -> None:
    assert audit["summary"]["untested"] == 0
    assert {each["circumstance"] for each in audit["untested"]} <= {"fp16", "FusedAdam"}
