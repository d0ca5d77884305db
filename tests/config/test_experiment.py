"""``load_experiment`` and its overrides. Run with ``pytest tests/config``; bad inputs are in tests/configs/inputs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dsaccum.config.errors import ConfigError
from dsaccum.config.loading import load_experiment


@pytest.fixture
def experiment_file(tmp_path):
    path = tmp_path / "demo.yaml"
    path.write_text(
        "name: demo\nmodel:\n  architecture: gpt2\n  config: {layer_norm_epsilon: 1e-6}\nauto:\n  lr: 3e-4\n"
    )
    return path


def test_defaults_and_exponents(experiment_file):
    experiment = load_experiment(experiment_file)
    assert (experiment.auto.lr, experiment.model.config) == (3e-4, {"layer_norm_epsilon": 1e-6})
    assert (experiment.data.source, experiment.run.steps) == ("python-stdlib", 100)


def test_overrides_are_typed_and_later_ones_win(experiment_file):
    overrides = ["run.steps=5", "run.steps=7", "auto.lr=1e-2", "model.config.n_layer=2", "data.packing=padded"]
    experiment = load_experiment(experiment_file, overrides)
    assert (experiment.run.steps, experiment.auto.lr, experiment.data.packing) == (7, 1e-2, "padded")
    assert experiment.model.config == {"layer_norm_epsilon": 1e-6, "n_layer": 2}


def test_overrides_may_exchange_the_model(experiment_file):
    overrides = ["model.architecture=null", "model.config={}", "model.factory=mine.py:build"]
    assert load_experiment(experiment_file, overrides).model.factory == "mine.py:build"


def test_a_mistake_is_blamed_on_whoever_made_it(experiment_file):
    experiment_file.write_text(experiment_file.read_text() + "run: {steps: 0}\n")
    with pytest.raises(ConfigError) as of_file:
        load_experiment(experiment_file, ["run.seed=1"])
    assert of_file.value.source == experiment_file
    with pytest.raises(ConfigError) as of_flag:
        load_experiment(experiment_file, ["run.steps=-1"])
    assert of_flag.value.source == "--set"


def test_config_imports_neither_torch_nor_deepspeed():
    code = (
        "import sys, dsaccum.batch, dsaccum.config.deepspeed, dsaccum.config.loading;"
        "sys.exit(bool({'torch', 'deepspeed', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
