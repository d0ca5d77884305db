"""What can be copied from the documents works: YAML and JSON load, factories build, Python runs, commands parse.

Run: pytest tests/docs/test_snippets.py. Not covered: training with them; ids on the hub (no network).
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from dsaccum.config.deepspeed import load_deepspeed_config
from dsaccum.config.experiment import Experiment
from dsaccum.config.loading import load_experiment
from dsaccum.data.tokens import load_tokenizer
from dsaccum.loss import build_loss
from dsaccum.model import build_model
from dsaccum.training.arguments import parse_arguments
from dsaccum.training.finish import save_model
from tests.docs.markdown import REPOSITORY, Block, blocks
from tests.model.test_model import TINY, build

YAMLS, JSONS, PYTHONS = blocks("yaml"), blocks("json"), blocks("python")
DEFAULT_EXPERIMENT = REPOSITORY / "launch/experiments/stdlib-nano.yaml"
LAUNCHERS = r"deepspeed|torchrun|python launch/train\.py"
COMMANDS = [
    pytest.param(line, id=f"{block.place}+{offset}")
    for block in blocks("bash")
    for offset, line in enumerate(block.text.splitlines(), start=1)
    if re.match(LAUNCHERS, line.split(" && ")[-1]) and "[" not in line
]


def place(block: Block) -> str:
    return block.place


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files that snippets name in their first line (``# models.py``)."""
    monkeypatch.chdir(tmp_path)
    for block in PYTHONS:
        if named := re.match(r"# (\w+\.py)\n", block.text):
            (tmp_path / named[1]).write_text(block.text)
    return tmp_path


def load(block: Block, folder: Path) -> Experiment:
    (folder / "snippet.yaml").write_text(block.text)
    return load_experiment(folder / "snippet.yaml")


@pytest.mark.parametrize("block", YAMLS, ids=place)
def test_yaml_is_an_experiment_and_what_it_names_exists(block: Block, in_a_folder: Path) -> None:
    experiment = load(block, in_a_folder)
    if experiment.model.factory is not None:
        model = build_model(
            experiment.model, vocabulary_size=50, sequence_length=16, seed=0, end_token=1, pad_token=0,
            source="snippet.yaml",
        )  # fmt: skip
        tokens = torch.randint(50, (2, 12))
        logits = model(input_ids=tokens).logits
        changed = tokens.clone()
        changed[:, 8:] = 3
        assert logits.shape == (2, 12, 50)
        assert torch.allclose(logits[:, :8], model(input_ids=changed).logits[:, :8], atol=1e-6), "looks ahead"
    if experiment.loss.factory is not None:
        loss = build_loss(experiment.loss.factory, source="snippet.yaml")
        outputs = type("Outputs", (), {"logits": torch.zeros(2, 4, 8)})
        labels = torch.tensor([[1, 2, 3, 4], [1, -100, 3, -100]])
        assert loss.count({"labels": labels}) == 4
        # Equal logits: every target costs log 8, with or without smoothing.
        assert float(loss.sum(outputs, {"labels": labels})) == pytest.approx(4 * torch.log(torch.tensor(8.0)).item())


@pytest.mark.parametrize("block", JSONS, ids=place)
def test_json_is_a_deepspeed_config_without_warnings(block: Block, in_a_folder: Path) -> None:
    from dsaccum.engine.schema import installed_schema

    (in_a_folder / "snippet.json").write_text(block.text)
    for yaml_block in YAMLS:
        experiment = load(yaml_block, in_a_folder)
        settings = load_deepspeed_config(
            in_a_folder / "snippet.json", schema=installed_schema(), experiment=experiment, world_size=4
        )
        assert settings.warnings == []
        assert settings.config["optimizer"]["params"]["lr"] == experiment.auto.lr
        assert '"auto"' not in json.dumps(settings.config)


@pytest.mark.parametrize("block", PYTHONS, ids=place)
def test_python_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder with a finished run's (small, untrained) model; what a snippet defines is there afterwards."""
    model = build(architecture="gpt2", config=TINY["gpt2"], vocabulary_size=384, sequence_length=128)
    run = tmp_path / "runs" / "stdlib-nano-1"
    run.mkdir(parents=True)
    save_model(model, dict(model.state_dict()), load_tokenizer("bytes"), run / "model")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "snippet"}
    exec(compile(block.text, block.place, "exec"), names)
    assert len(names) > 2, "a snippet defines something (besides its name and the builtins)"


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_parse_and_their_files_exist(line: str) -> None:
    words = shlex.split(line.split(" && ")[-1])
    flags = words[words.index("launch/train.py") + 1 :]
    arguments = parse_arguments(flags, DEFAULT_EXPERIMENT)
    assert (REPOSITORY / arguments.deepspeed).is_file()
    load_experiment(REPOSITORY / arguments.experiment, arguments.overrides)


def test_there_is_something_to_test() -> None:
    assert (len(YAMLS) >= 6, len(JSONS) >= 1, len(PYTHONS) >= 4, len(COMMANDS) >= 8) == (True, True, True, True)
