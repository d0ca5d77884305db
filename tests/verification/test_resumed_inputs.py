"""What ``dsaccum verify --resume DIR`` refuses, and what it reads of a run, without training one.

Run: pytest tests/verification/test_resumed_inputs.py. Whole verifications: test_resumed.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dsaccum.cli.app import main
from dsaccum.config.errors import ConfigError
from dsaccum.durable import Written, read_back
from dsaccum.training.checkpoints.manifest import Counters, Manifest, Split
from dsaccum.training.checkpoints.shelf import Checkpoint
from dsaccum.verification.cases.saved_state import UnknownLayout, read_saved_state
from dsaccum.verification.resumed.arguments import ResumeArguments
from dsaccum.verification.resumed.found_run import copy_checkpoint, find_run
from dsaccum.verification.resumed.inputs import read_resumed_case

EXPERIMENT = {"name": "small", "model": {"architecture": "gpt2"}, "data": {"source": "python-stdlib"}}
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "train_batch_size": 16,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-3}},
}


def write_run(directory: Path, **changes: Any) -> Path:
    record = {"schema": "dsaccum.train/1", "experiment": EXPERIMENT, "deepspeed": CONFIG, "data": {}}
    directory.mkdir(exist_ok=True)
    (directory / "run.json").write_text(json.dumps({**record, **changes}))
    return directory


def write_checkpoint(run: Path, step: int, files: dict[str, Any], stage: int = 0, ranks: int = 1) -> Path:
    path = run / f"checkpoints/step-{step}"
    (path / "state").mkdir(parents=True)
    written: dict[str, Written] = {}
    for name, content in files.items():
        torch.save(content, path / "state" / name)
        written[f"state/{name}"] = read_back(path / "state" / name)
    split = Split(world_size=ranks, accumulation_steps=4, micro_batch=4 // ranks)
    manifest = Manifest(
        counters=Counters(step=step), split=split, zero_stage=stage, metrics_bytes=0, versions={}, files=written
    )
    (path / "checkpoint.json").write_bytes(manifest.as_bytes())
    return path


def write_metrics(run: Path, steps: int) -> None:
    lines = ({"step": step, "applied": step != 2, "effective_batch": 16} for step in range(1, steps + 1))
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schema": "dsaccum.train/2"}, "its run.json is dsaccum.train/2, and this dsaccum reads dsaccum.train/1"),
        ({"experiment": {**EXPERIMENT, "model": {"architektur": "gpt2"}}}, "model.architektur"),
        ({"deepspeed": None}, "its run.json lacks the configs"),
        ({}, "holds no whole checkpoint; fix: a run with run.checkpoint_every"),
    ],
)
def test_what_cannot_be_gone_on_from_is_one_line(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    write_run(tmp_path / "run", **changes)
    with pytest.raises(ConfigError) as refused:
        copy_checkpoint(find_run(tmp_path / "run"), tmp_path, lambda _: True)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_directory_without_a_run_ends_the_command_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--resume", str(tmp_path), "--ranks", "1"]) == 2
    fix = "fix: the directory that the run itself named"
    said = f"error: --resume: {tmp_path}: holds no run (no run.json that can be read); {fix}\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    "flags", [["--deepspeed", "my.json"], ["--experiment", "my.yaml"], ["--set", "a.b=1"], ["--loop", "hf-labels"]]
)
def test_what_the_run_itself_says_cannot_be_given(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "--resume", str(tmp_path), *flags]) == 2
    said = capsys.readouterr().err
    assert f"error: {flags[0]}: cannot be given with --resume" in said
    assert said.count("\n") == 1


def test_a_checkpoint_of_another_version_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    path = write_checkpoint(run, 4, {}) / "checkpoint.json"
    path.write_text(path.read_text().replace("dsaccum.checkpoint/1", "dsaccum.checkpoint/2"))
    with pytest.raises(ConfigError, match=r"its checkpoints are dsaccum.checkpoint/2, which this dsaccum doesn't read"):
        copy_checkpoint(find_run(run), tmp_path, lambda _: True)


def test_metrics_that_lack_steps_are_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_checkpoint(run, 4, {})
    write_metrics(run, 3)
    with pytest.raises(ConfigError, match=r"its metrics.jsonl lacks steps of 1 to 4, where the checkpoint stands"):
        copy_checkpoint(find_run(run), tmp_path, lambda _: True)


def test_the_newest_that_suits_is_copied_and_others_are_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for step in (2, 4, 6):
        write_checkpoint(run, step, {"model.pt": step})
    write_metrics(run, 6)
    (run / "checkpoints/step-4/state/model.pt").write_bytes(b"damaged")
    copy, steps, passed_over = copy_checkpoint(find_run(run), tmp_path, lambda so_far: so_far.updates < 4)
    assert (copy.step, copy.path) == (2, tmp_path / "step-2")
    assert (steps.effective_batches, steps.updates) == ((16, 16), 1), "one of two was skipped"
    assert passed_over[0].startswith("step-6 is passed over: after it the learning rate stays 0")
    assert passed_over[1].startswith("step-4 is damaged (state/model.pt: 7 bytes,")


def test_another_effective_batch_is_refused_with_both(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_checkpoint(run, 4, {})
    write_metrics(run, 4)
    for numbers, said in (
        ({"accumulation_steps": 3}, "16 is not 1 rank x 3 steps x B for any whole B"),
        ({"accumulation_steps": 4, "micro_batch": 8}, "train_batch_size 16 is not 1 rank x 4 steps x 8 = 32"),
    ):
        (folder := tmp_path / said[:2].strip() / str(numbers["accumulation_steps"])).mkdir(parents=True)
        with pytest.raises(ConfigError) as refused:
            read_resumed_case(ResumeArguments(run, ranks=1, **numbers), folder)
        assert said in str(refused.value)
        assert "the run's effective batch is 16 (1 x 4 x 4), and stays" in str(refused.value)


# --- the state, read without DeepSpeed's loader: known numbers, cut as each stage cuts them ---

SHAPES = {"a": torch.Size([3, 3]), "b": torch.Size([4])}
A, B = torch.arange(9.0).reshape(3, 3), torch.arange(4.0) + 100


def _flat(factor: float) -> torch.Tensor:
    return torch.cat([A.reshape(-1), B]) * factor


def _of(checkpoint: Path) -> Checkpoint:
    manifest = Manifest.read(checkpoint)
    assert manifest is not None
    return Checkpoint(checkpoint, manifest)


def _files_of_zero_1() -> dict[str, Any]:
    """13 elements and one of padding, on two ranks."""
    padded = {key: torch.cat([_flat(factor), torch.zeros(1)]) for key, factor in (("w", 1), ("m", 2), ("v", 3))}
    files: dict[str, Any] = {"mp_rank_00_model_states.pt": {"module": {"buffer": B}, "param_shapes": [SHAPES]}}
    for rank, here in enumerate((slice(0, 7), slice(7, 14))):
        state = {"step": torch.tensor(5.0), "exp_avg": padded["m"][here], "exp_avg_sq": padded["v"][here]}
        files[f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = {
            "optimizer_state_dict": {
                "single_partition_of_fp32_groups": [padded["w"][here]],
                "base_optimizer_state": {"state": {0: state}},
            }
        }
    return files


def _files_of_zero_3() -> dict[str, Any]:
    """5 and 4 elements of ``a`` with one of padding, 2 and 2 of ``b``."""
    files: dict[str, Any] = {}
    for rank in range(2):

        def part(factor: float, rank: int = rank) -> torch.Tensor:
            a = torch.cat([A.reshape(-1), torch.zeros(1)])[5 * rank : 5 * rank + 5]
            return torch.cat([a, B[2 * rank : 2 * rank + 2]]) * factor

        state = {"step": torch.tensor(5.0), "exp_avg": part(2), "exp_avg_sq": part(3)}
        files[f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"] = {
            "module": {"a": torch.empty(0), "b": torch.empty(0), "buffer": B},
            "param_shapes": [SHAPES],
        }
        files[f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = {
            "optimizer_state_dict": {"fp32_flat_groups": [part(1)], "optimizer_state_dict": {"state": {0: state}}}
        }
    return files


def _files_of_zero_0() -> dict[str, Any]:
    states = {
        index: {"step": torch.tensor(5.0), "exp_avg": each * 2, "exp_avg_sq": each * 3}
        for index, each in enumerate((A, B))
    }
    return {
        "mp_rank_00_model_states.pt": {"module": {"a": A, "b": B, "buffer": B}, "optimizer": {"state": states}},
    }


def _files_of_flat_masters() -> dict[str, Any]:
    state = {"step": torch.tensor(5.0), "exp_avg": _flat(2), "exp_avg_sq": _flat(3)}
    optimizer = {"fp32_groups_flat": [_flat(1)], "optimizer_state_dict": {"state": {0: state}}}
    return {"mp_rank_00_model_states.pt": {"module": {"buffer": B}, "optimizer": optimizer}}


@pytest.mark.parametrize(
    ("stage", "ranks", "files"),
    [
        (0, 1, _files_of_zero_0()),
        (0, 1, _files_of_flat_masters()),
        (1, 2, _files_of_zero_1()),
        (3, 2, _files_of_zero_3()),
    ],
)
def test_the_state_is_read_as_it_was_cut(tmp_path: Path, stage: int, ranks: int, files: dict[str, Any]) -> None:
    saved = read_saved_state(_of(write_checkpoint(write_run(tmp_path), 5, files, stage, ranks)), SHAPES)
    for name, value in (("a", A), ("b", B)):
        assert torch.equal(saved.weights[name], value)
        assert torch.equal(saved.states[name]["exp_avg"], 2 * value)
        assert torch.equal(saved.states[name]["exp_avg_sq"], 3 * value)
        assert float(saved.states[name]["step"]) == 5
    assert list(saved.fixed) == ["buffer"]


def test_a_layout_that_is_not_known_is_said(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(write_run(tmp_path), 5, {"mp_rank_00_model_states.pt": {"module": {}}})
    with pytest.raises(UnknownLayout, match="KeyError"):
        read_saved_state(_of(checkpoint), SHAPES)
