"""A run is verified before its first step, on its own ranks and as its process is patched, and trains to the same bits.

Run: pytest -n 0 tests/preflight/test_run.py; the ways of stepping beyond ZeRO 0 are slow. Not covered: GPUs, several
machines.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsaccum.verification.records.record import VerifyRecord
from tests.training.launching import ACCUM4, TINY, Ended, environment, run_train

HERE = Path(__file__).parent
FAULTY = HERE.parent / "training" / "faulty.py"
ON = ("--preflight", "auto", *TINY, "--steps", "3")


def train(folder: Path, *flags: str, name: str = "run", env: dict[str, str] | None = None, **how: Any) -> Ended:
    given = {"XDG_CACHE_HOME": str(folder / "cache"), **(env or {})}
    return run_train(*flags, "--output-dir", str(folder / name), cwd=folder, env=environment(**given), **how)


def preflight_lines(ended: Ended) -> list[str]:
    return [line for line in ended.stdout.splitlines() if line.startswith("preflight ")]


def steps_of(run: Path) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def record_of(run: Path) -> Any:
    return json.loads((run / "run.json").read_text())


@pytest.mark.slow
def test_a_run_is_verified_once_and_trains_to_the_same_bits(tmp_path: Path) -> None:
    first, again = train(tmp_path, *ON), train(tmp_path, *ON, name="again")
    off = train(tmp_path, *ON[2:], "--preflight", "off", name="off")
    assert [ended.code for ended in (first, again, off)] == [0, 0, 0], first.said
    [begun, ended] = preflight_lines(first)
    assert begun.endswith("once for this config, model and code ...")
    assert "equivalent: 4 micro-batches of 2 on 1 rank gave the update of one batch of 8 (" in ended
    [kept] = (tmp_path / "cache" / "dsaccum" / "preflight").iterdir()
    assert VerifyRecord.read(kept).verdict == "equivalent"
    [line] = preflight_lines(again)
    assert line.endswith(" for this config, model and code")
    assert record_of(tmp_path / "again")["preflight"]["fingerprint"] == kept.stem
    assert preflight_lines(off) == []
    assert record_of(tmp_path / "off")["preflight"] is None
    assert steps_of(tmp_path / "run") == steps_of(tmp_path / "again") == steps_of(tmp_path / "off")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bits_are_the_same_in_every_way_of_stepping(tmp_path: Path, stage: int, precision: dict[str, Any]) -> None:
    config = json.loads(ACCUM4.read_text()) | {"zero_optimization": {"stage": stage}} | precision
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    on = train(tmp_path, *ON, name="on", deepspeed=path, ranks=2)
    off = train(tmp_path, *ON[2:], "--preflight", "off", name="off", deepspeed=path, ranks=2)
    assert (on.code, off.code) == (0, 0), on.said
    assert "equivalent: 4 micro-batches of 2 on 2 ranks" in preflight_lines(on)[-1]
    assert steps_of(tmp_path / "on") == steps_of(tmp_path / "off")


@pytest.mark.slow
def test_a_fault_patched_into_deepspeed_stops_the_run(tmp_path: Path) -> None:
    """Also where the same config was verified before, without the patch."""
    assert train(tmp_path, *ON, name="clean").code == 0
    ended = train(tmp_path, *ON, script=HERE / "patched.py")
    assert ended.code == 1, ended.said
    assert "loss-scaled-twice (certain)" in ended.stderr
    assert "fix  " in ended.stderr
    assert "Traceback" not in ended.said
    assert ended.errors[-1].startswith("error: stopped before the first step")
    assert not (tmp_path / "run").exists()
    off = train(tmp_path, *ON[2:], "--preflight", "off", script=HERE / "patched.py")
    assert off.code == 0, "whoever insists may train"


@pytest.mark.distributed
def test_all_ranks_stop_and_the_first_says_why_once(tmp_path: Path) -> None:
    ended = train(tmp_path, *ON, script=HERE / "patched.py", ranks=2)
    assert ended.code == 1, ended.said
    assert ended.said.count("loss-scaled-twice (certain)") == 1
    assert ended.said.count("error: stopped before the first step") == 1
    assert "Traceback" not in ended.said


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise", "rank 1 failed in the preflight: RuntimeError: no more; --preflight off starts without it"),
        ("hang", "no progress for 20 s (run.timeout_s): rank 1 hangs in setup"),
        ("kill", "rank 1 has ended"),
    ],
)
def test_a_rank_that_fails_in_the_preflight_is_named(tmp_path: Path, fault: str, said: str) -> None:
    given = {"FAULT": fault, "FAULT_PHASE": "forward", "FAULT_RANK": "1", "FAULT_CALL": "8"}
    factory = ("--set", "model={factory: " + str(FAULTY) + ":model}", "--set", "data.sequence_length=32")
    limit = ("--set", "run.timeout_s=20", "--steps", "2")
    ended = train(tmp_path, "--preflight", "auto", *factory, *limit, env=given, ranks=2)
    assert ended.code != 0
    assert said in ended.said
    assert ended.seconds < 120
