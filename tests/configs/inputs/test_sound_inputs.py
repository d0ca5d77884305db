"""Configs of the kinds that public examples use are accepted whole, and come out with nothing left open.

Run with ``pytest tests/configs/inputs``. Not covered: training with them, which needs the machines they were made for.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from dsaccum.config.deepspeed import load_deepspeed_config

SOUND = Path(__file__).parent / "sound"
CASES = yaml.safe_load((SOUND / "cases.yaml").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["file"])
def test_public_kind_of_config_is_accepted(case, schema_on, full_experiment):
    world_size = case.get("world_size", 1)
    settings = load_deepspeed_config(
        SOUND / case["file"],
        schema=schema_on(**case.get("machine", {})),
        experiment=full_experiment,
        world_size=world_size,
        **case.get("flags", {}),
    )
    config = settings.config
    assert '"auto"' not in json.dumps(config)
    product = world_size * config["gradient_accumulation_steps"] * config["train_micro_batch_size_per_gpu"]
    assert config["train_batch_size"] == settings.batch.total == product


def test_every_sound_input_stands_in_the_table():
    assert {case["file"] for case in CASES} == {path.name for path in SOUND.glob("*.json")}
    assert len(CASES) >= 30
