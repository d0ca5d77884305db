"""Every shipped JSON and YAML is run: two optimizer steps of a shrunk model, and it must say nothing odd.

Run: pytest tests/configs/test_shipped.py. Not covered: figures of whole runs (test_default_run.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.training.launching import REPOSITORY, Ended, run_train

JSONS = sorted((REPOSITORY / "ds_configs").glob("*.json"))
EXPERIMENTS = sorted((REPOSITORY / "launch" / "experiments").glob("*.yaml"))
SMALL_MODEL = {
    "gpt2-small": ["model.config={n_layer: 2, n_head: 2, n_embd: 32}", "data.tokenizer=bytes"],
    "llama-nano": [
        "model.config={num_hidden_layers: 1, hidden_size: 32, intermediate_size: 64, num_attention_heads: 2}"
    ],
}
QUICK = {"accum4", "bf16_accum4", "zero2_accum4", "zero3_accum4", "stdlib-nano", "llama-nano"}
"""Run in CI, too; each is a start of a launcher. The others differ from one of them in a number or in their data."""
SMALL_GPT_NEOX = [
    "model.config={num_hidden_layers: 1, num_attention_heads: 2, hidden_size: 32, intermediate_size: 128}"
]


def run_small(cwd: Path, config: Path, experiment: Path) -> Ended:
    changes = [*SMALL_MODEL.get(experiment.stem, SMALL_GPT_NEOX), "data.sequence_length=128", "auto.warmup_num_steps=1"]
    flags = [flag for change in changes for flag in ("--set", change)]
    return run_train("--experiment", str(experiment), "--steps", "2", *flags, cwd=cwd, deepspeed=config)


def check(ended: Ended, folder: Path, experiment: str) -> None:
    assert ended.code == 0, ended.said
    assert not [line for line in ended.said.splitlines() if line.lower().startswith("warning")], ended.said
    lines = [json.loads(line) for line in (folder / f"runs/{experiment}-1/metrics.jsonl").read_text().splitlines()]
    assert [line["applied"] for line in lines] == [True, True]
    assert all(4.5 < line["loss"] < 7 for line in lines), "untrained: near log(384) = 5.95"
    assert lines[0]["gradient_norm"] > 0
    assert (folder / f"runs/{experiment}-1/model/model.safetensors").exists()


def _in_ci(path: Path) -> Any:
    return pytest.param(path, id=path.stem, marks=[] if path.stem in QUICK else [pytest.mark.slow])


def test_there_is_something_to_run() -> None:
    assert len(JSONS) >= 8
    assert len(EXPERIMENTS) >= 4


@pytest.mark.parametrize("config", [_in_ci(path) for path in JSONS])
def test_json_runs(tmp_path: Path, config: Path) -> None:
    experiment = REPOSITORY / "launch/experiments/stdlib-nano.yaml"
    check(run_small(tmp_path, config, experiment), tmp_path, "stdlib-nano")


@pytest.mark.parametrize("experiment", [_in_ci(path) for path in EXPERIMENTS])
def test_experiment_runs(tmp_path: Path, experiment: Path) -> None:
    check(run_small(tmp_path, REPOSITORY / "ds_configs/accum4.json", experiment), tmp_path, experiment.stem)
