"""The same command on a GPU: nothing in the code knows which device it runs on.

Run: pytest -m gpu tests/training/test_cuda.py -n 0. Not covered: several GPUs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.training.launching import ACCUM4, REPOSITORY, TINY, run_train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]


@pytest.mark.parametrize("name", ["accum4", "accum1", "zero1_accum4", "zero2_accum4", "zero3_accum4", "bf16_accum4"])
def test_shipped_config_learns_on_a_gpu(tmp_path: Path, name: str) -> None:
    ended = run_train(*TINY, "--steps", "20", cwd=tmp_path, deepspeed=REPOSITORY / f"ds_configs/{name}.json")
    assert ended.code == 0, ended.said
    record = json.loads((tmp_path / "runs/stdlib-nano-1/run.json").read_text())
    assert record["last_loss"] < record["first_loss"] - 0.5


def test_fp16_learns_at_zero_1(tmp_path: Path) -> None:
    config = json.loads(ACCUM4.read_text())
    config |= {"fp16": {"enabled": True, "initial_scale_power": 12}, "zero_optimization": {"stage": 1}}
    (tmp_path / "fp16.json").write_text(json.dumps(config))
    ended = run_train(*TINY, "--steps", "20", cwd=tmp_path, deepspeed=tmp_path / "fp16.json")
    assert ended.code == 0, ended.said
    record = json.loads((tmp_path / "runs/stdlib-nano-1/run.json").read_text())
    assert record["last_loss"] < record["first_loss"] - 0.5
