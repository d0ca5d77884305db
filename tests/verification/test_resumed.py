"""``dsaccum verify --resume DIR``: a run that goes on in another split is the big batch; what a load loses is named.

Run: pytest -n 0 -m "slow or not slow" tests/verification/test_resumed.py. The runs are real ones of 12 steps. Controls:
weights, moments, schedule or the place in the stream lost on the load, each on the real product with one thing taken
away; and a checkpoint whose own account of the stream is one sample off, while the metrics are right. Not covered:
fp16, offload, and optimizers without moments at ZeRO 1 to 3, which DeepSpeed itself cannot convert.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsaccum.cli.app import main
from dsaccum.verification.progress import SilentProgress
from dsaccum.verification.ranks.pools import RankPools
from dsaccum.verification.records.record import VerifyRecord
from dsaccum.verification.resumed.arguments import ResumeArguments
from dsaccum.verification.resumed.verify import verify_resumed
from dsaccum.verification.subject.faults import OF_RESUMPTION
from tests.endurance.running import FLAGS, STEPS, move_in_stream, train
from tests.training.launching import REPOSITORY, run_train

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(1200)]
Begun = Callable[[int, int], Path]


@pytest.fixture(scope="session")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Begun:
    """By ZeRO stage and ranks: a finished run of E = 16."""
    known: dict[tuple[int, int], Path] = {}

    def of(stage: int, ranks: int) -> Path:
        if (stage, ranks) not in known:
            run = tmp_path_factory.mktemp(f"stage{stage}") / "run"
            rows = ["--micro-batch", str(4 // ranks)]
            ended = train(run, *rows, stage=stage, ranks=None if ranks == 1 else ranks)
            assert ended.code == 0, ended.said
            known[stage, ranks] = run
        return known[stage, ranks]

    return of


def verify(pools: RankPools, run: Path, ranks: int, steps: int, fault: str | None = None) -> VerifyRecord:
    arguments = ResumeArguments(run, ranks=ranks, accumulation_steps=steps, fault=fault)
    return verify_resumed(arguments, SilentProgress(), pools)


@pytest.mark.parametrize(
    ("stage", "before", "ranks", "steps"),
    [(0, 1, 1, 8), (0, 1, 2, 2), (0, 1, 2, 8), (1, 2, 1, 4), (1, 2, 2, 2), (2, 2, 1, 16), (3, 2, 1, 2)],
)
def test_any_split_of_the_same_batch_goes_on(
    begun: Begun, rank_pool: RankPools, stage: int, before: int, ranks: int, steps: int
) -> None:
    record = verify(rank_pool, begun(stage, before), ranks, steps)
    assert record.verdict == "equivalent", record.reasons
    assert [step.step for step in record.steps] == [STEPS + 1, STEPS + 2, STEPS + 3]
    assert [step.window for step in record.steps] == [STEPS, STEPS + 1, STEPS + 2]
    resumed = record.resumed
    assert resumed is not None
    assert (resumed.step, resumed.updates, resumed.samples) == (STEPS, STEPS, 16 * STEPS)
    assert (resumed.compared, resumed.differing) == (16, {})
    assert set(resumed.states) == {"step", "exp_avg", "exp_avg_sq"}
    assert record.trajectory.max is not None
    assert record.trajectory.bound is not None
    assert record.trajectory.max <= record.trajectory.bound


@pytest.mark.parametrize("stage", [0, 1])
def test_low_precision_goes_on_from_its_fp32_weights(rank_pool: RankPools, tmp_path: Path, stage: int) -> None:
    config = json.loads((REPOSITORY / "ds_configs/bf16_accum4.json").read_text())
    if stage == 0:
        config["zero_optimization"]["stage"] = 0
        del config["data_types"]  # at ZeRO 0 bf16 accumulates in bf16
    (tmp_path / "ds.json").write_text(json.dumps(config))
    ended = run_train(*FLAGS, "--output-dir", "run", cwd=tmp_path, deepspeed=tmp_path / "ds.json")
    assert ended.code == 0, ended.said
    record = verify(rank_pool, tmp_path / "run", 1, 8)
    assert (record.verdict, record.precision) == ("equivalent", "bf16"), record.reasons
    assert record.resumed is not None
    assert record.resumed.differing == {}


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("fault", OF_RESUMPTION)
def test_what_a_load_loses_is_named(begun: Begun, rank_pool: RankPools, stage: int, fault: str) -> None:
    record = verify(rank_pool, begun(stage, 1 + stage), 1, 4, fault)
    assert record.verdict == "not_equivalent"
    assert [(cause.id, cause.confidence) for cause in record.causes] == [(fault, "certain")]
    failed = {
        "weights-not-restored": "update",
        "optimizer-state-not-restored": "update",
        "schedule-not-restored": "schedule",
        "stream-position-not-restored": "samples",
    }
    assert failed[fault] in record.claims.which("fail")


def test_two_things_that_are_lost_are_both_named(begun: Begun, rank_pool: RankPools) -> None:
    both = "optimizer-state-not-restored+stream-position-not-restored"
    record = verify(rank_pool, begun(0, 1), 1, 2, both)
    assert {cause.id for cause in record.causes} == set(both.split("+"))


def test_a_fault_of_accumulation_is_called_by_its_name_here_too(begun: Begun, rank_pool: RankPools) -> None:
    record = verify(rank_pool, begun(0, 1), 2, 4, "loss-scaled-twice")
    assert [cause.id for cause in record.causes] == ["loss-scaled-twice"]


@pytest.mark.parametrize("late", [1, -16])
def test_a_checkpoint_that_is_wrong_about_the_stream_is_seen(
    begun: Begun, rank_pool: RankPools, tmp_path: Path, late: int
) -> None:
    run = tmp_path / "run"
    shutil.copytree(begun(0, 1), run)
    for checkpoint in run.glob("checkpoints/step-*"):
        move_in_stream(checkpoint, window=1, position=16 + late)
    record = verify(rank_pool, run, 1, 8)
    assert [cause.id for cause in record.causes] == ["stream-position-not-restored"]
    assert record.resumed is not None
    assert record.resumed.stream_offset == late


def test_the_command_leaves_the_run_as_it_was(begun: Begun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = begun(1, 2), tmp_path / "resumed.json"
    before = _content(run)
    code = main(["verify", "--resume", str(run), "--ranks", "1", "--accum-steps", "8", "--json", str(out)])
    assert code == 0, capsys.readouterr().err
    assert _content(run) == before
    told = capsys.readouterr().out
    assert f"step-{STEPS}, {16 * STEPS} samples; before as 2 x 4 x 2" in " ".join(told.split())
    assert json.loads(out.read_text())["resumed"]["checkpoint"] == f"step-{STEPS}"
    assert main(["verify", "--resume", str(run), "--ranks", "3", "--accum-steps", "4"]) == 2
    said = capsys.readouterr().err
    assert "is not 3 ranks x 4 steps x B for any whole B" in said
    assert "the run's effective batch is 16 (2 x 4 x 2), and stays" in said


def test_a_damaged_checkpoint_is_passed_over(begun: Begun, rank_pool: RankPools, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(begun(0, 1), run)
    state = run / f"checkpoints/step-{STEPS}/state/mp_rank_00_model_states.pt"
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1
    state.write_bytes(content)
    record = verify(rank_pool, run, 1, 2)
    assert record.verdict == "equivalent"
    assert record.resumed is not None
    assert record.resumed.step == STEPS - 2
    assert any(f"step-{STEPS} is damaged (state/mp_rank_00_model_states.pt" in line for line in record.warnings)


def _content(directory: Path) -> dict[str, Any]:
    """Every file's bytes and time of change."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {
        str(path.relative_to(directory)): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in files
    }
