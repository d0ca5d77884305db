"""What can be copied from the documents works: YAML and JSON load, factories build, Python runs, commands parse.

Run: pytest tests/docs/test_snippets.py. Not covered: training and verifying with them (the verification is a stub); ids
on the hub (no network); the workflow on GitHub.
"""

from __future__ import annotations

import inspect
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml

from dsaccum import testing
from dsaccum.cli import main
from dsaccum.config.deepspeed import load_deepspeed_config
from dsaccum.config.experiment import Experiment
from dsaccum.config.loading import load_experiment
from dsaccum.data.tokens import load_tokenizer
from dsaccum.loss import build_loss
from dsaccum.model import build_model
from dsaccum.training.arguments import parse_arguments
from dsaccum.training.finish import save_model
from dsaccum.verification.records.watch import WatchRecord
from dsaccum.verification.resumed.arguments import ResumeArguments
from dsaccum.verification.subject.faults import fault_of
from tests.cli.conftest import StubVerify, stub  # noqa: F401  (a fixture)
from tests.docs.markdown import REPOSITORY, Block, blocks
from tests.model.test_model import TINY, build
from tests.report import watch_records

YAMLS, JSONS, PYTHONS, WORKFLOWS = blocks("yaml"), blocks("json"), blocks("python"), blocks("yml")
DEFAULT_EXPERIMENT = REPOSITORY / "launch/experiments/stdlib-nano.yaml"
LAUNCHERS = r"deepspeed|torchrun|python launch/train\.py"
COMMANDS = [
    pytest.param(line, id=f"{block.place}+{offset}")
    for block in blocks("bash")
    for offset, line in enumerate(block.text.splitlines(), start=1)
    if re.match(LAUNCHERS, line.split(" && ")[-1]) and "[" not in line and "dsaccum.watch" not in line
]
VERIFICATIONS = [
    pytest.param(words, id=f"{block.place}+{offset}")
    for block in blocks("bash", "yml")
    for offset, line in enumerate(block.text.splitlines(), start=1)
    if "[" not in line and (words := re.findall(r"^(?:- run: )?(dsaccum verify [^;]*)", line.strip()))
]


def place(block: Block) -> str:
    return block.place


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the shipped files, and those that snippets name in a first line (``# models.py``)."""
    monkeypatch.chdir(tmp_path)
    for name in ("ds_configs", "launch"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
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
        outputs = type("Outputs", (), {"logits": torch.zeros(2, 4, 8, requires_grad=True)})
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
            in_a_folder / "snippet.json",
            schema=installed_schema(),
            experiment=experiment,
            world_size=4,
            may_be_automatic=True,
        )
        assert settings.warnings == []
        assert settings.config["optimizer"]["params"]["lr"] == experiment.auto.lr
        assert '"auto"' not in json.dumps(settings.config)


@pytest.mark.parametrize("block", PYTHONS, ids=place)
def test_python_runs(
    block: Block,
    in_a_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stub: StubVerify,  # noqa: F811
) -> None:
    """In a folder with a finished run's (small, untrained) model; what a snippet defines is there afterwards.

    Its tests are called as pytest would, first parameters only; verification and watched script are stubs.
    """
    scripts: list[str] = []

    def watch_script(script: str, *words: str, **keywords: Any) -> WatchRecord:
        inspect.signature(testing.assert_script_equivalent).bind(script, *words, **keywords)  # or a TypeError
        scripts.append(script)
        return watch_records.wrong() if "--old" in words else watch_records.two_windows()

    monkeypatch.setattr(testing, "watch_script", watch_script)
    model = build(architecture="gpt2", config=TINY["gpt2"], vocabulary_size=384, sequence_length=128)
    run = tmp_path / "runs" / "stdlib-nano-1"
    run.mkdir(parents=True)
    save_model(model, dict(model.state_dict()), load_tokenizer("bytes"), run / "model")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "snippet"}
    exec(compile(block.text, block.place, "exec"), names)
    assert len(names) > 2, "a snippet defines something (besides its name and the builtins)"
    for name, function in list(names.items()):
        if name.startswith("test_"):
            marks = getattr(function, "pytestmark", [])
            given = {mark.args[0]: mark.args[1][0] for mark in marks} | {"rank_pool": None}
            asked = len(stub.calls) + len(scripts)
            function(**{name: given[name] for name in inspect.signature(function).parameters})
            assert len(stub.calls) + len(scripts) > asked
            assert all((REPOSITORY / call.deepspeed).is_file() for call, _ in stub.calls)


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_parse_and_their_files_exist(line: str) -> None:
    words = shlex.split(line.split(" && ")[-1])
    flags = words[words.index("launch/train.py") + 1 :]
    arguments = parse_arguments(flags, DEFAULT_EXPERIMENT)
    assert (REPOSITORY / arguments.deepspeed).is_file()
    load_experiment(REPOSITORY / arguments.experiment, arguments.overrides)


@pytest.mark.parametrize("words", VERIFICATIONS)
def test_verifications_parse_and_their_files_exist(
    words: list[str],
    in_a_folder: Path,
    stub: StubVerify,  # noqa: F811
) -> None:
    (run := in_a_folder / "runs/mine").mkdir(parents=True)
    (run / "run.json").write_text('{"schema": "dsaccum.train/1"}')
    assert main(shlex.split(words[0])[1:]) == 0
    [(arguments, _)] = stub.calls
    if isinstance(arguments, ResumeArguments):
        return
    assert (REPOSITORY / arguments.deepspeed).is_file()
    load_experiment(REPOSITORY / (arguments.experiment or DEFAULT_EXPERIMENT), arguments.overrides)
    fault_of(arguments.fault)


@pytest.mark.parametrize("block", WORKFLOWS, ids=place)
def test_workflows_have_jobs_with_steps(block: Block) -> None:
    [job] = yaml.safe_load(block.text)["jobs"].values()
    assert all(step.keys() & {"run", "uses"} for step in job["steps"])


def test_the_loop_gives_the_mean_over_the_micro_batchs_own_targets(in_a_folder: Path) -> None:
    """And calls the engine as the verification's own loops do, with and without a mask."""
    names: dict[str, Any] = {}
    exec((in_a_folder / "my_loop.py").read_text(), names)
    model = build(architecture="gpt2", config=TINY["gpt2"], vocabulary_size=50, sequence_length=16)
    tokens = torch.randint(50, (3, 12))
    labels = tokens.clone()
    labels[1, 5:] = -100
    for mask in ({}, {"attention_mask": torch.ones_like(tokens)}):
        logits = model(input_ids=tokens, **mask).logits
        terms = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
        found = names["loss_of"](model, {"input_ids": tokens, "labels": labels, **mask})
        assert found.item() == pytest.approx((terms.sum() / (labels[:, 1:] != -100).sum()).item(), rel=1e-6)


def test_the_fault_of_your_own_is_one(in_a_folder: Path) -> None:
    fault: Any = fault_of("my_fault.py:one_percent")
    case = SimpleNamespace()
    assert [[fault.factor(case, rank, step) for step in (1, 2)] for rank in (0, 1)] == [[1.0, 1.01], [1.0, 1.0]]


def test_there_is_something_to_test() -> None:
    found = YAMLS, JSONS, PYTHONS, COMMANDS, VERIFICATIONS, WORKFLOWS
    assert all(len(blocks) >= least for blocks, least in zip(found, (6, 1, 8, 8, 10, 1), strict=True))


def test_a_wrong_flag_would_be_noticed(stub: StubVerify, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    """Control: the parser behind the stub is the real one."""
    assert main(["verify", "--deepspeed", "ds_configs/accum4.json", "--rank", "2"]) == 2
    assert stub.calls == []
    assert "fix: --ranks" in capsys.readouterr().err


def test_the_window_loop_undoes_what_the_engine_does(in_a_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 micro-steps on 2 ranks: divided by both, what is left is the sum over the window's targets."""
    names: dict[str, Any] = {}
    exec((in_a_folder / "my_window_loop.py").read_text(), names)
    monkeypatch.setattr(names["dist"], "get_world_size", lambda: 2)
    model = build(architecture="gpt2", config=TINY["gpt2"], vocabulary_size=50, sequence_length=16)
    model.gradient_accumulation_steps = lambda: 4
    tokens = torch.randint(50, (3, 12))
    logits = model(input_ids=tokens).logits
    total = F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="sum").item()
    fed = names["loss_of"](model, {"input_ids": tokens, "labels": tokens}, window_targets=264).item()
    assert fed / 4 / 2 == pytest.approx(total / 264, rel=1e-6)
