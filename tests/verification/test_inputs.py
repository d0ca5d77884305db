"""From the user's files to a case: what is read, what is derived from it, and what is refused.

Run: pytest -n 0 tests/verification/test_inputs.py. Not covered: what the ranks make of the case.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dsaccum.config.errors import ConfigError
from dsaccum.config.schema import DeepSpeedSchema, Machine
from dsaccum.data import load_data
from dsaccum.engine.schema import installed_schema
from dsaccum.model import build_model
from dsaccum.verification.cases import inputs
from dsaccum.verification.cases.arguments import VerifyArguments
from dsaccum.verification.cases.inputs import PreparedCase, read_case
from dsaccum.verification.cases.windows import case_stream

E, N, B = "train_batch_size", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu"
REPOSITORY = Path(__file__).parents[2]
JSONS = sorted((REPOSITORY / "ds_configs").glob("*.json"))
PLAIN: dict[str, Any] = {
    B: 2,
    N: 3,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
SMALL: dict[str, Any] = {
    "name": "small",
    "model": {"architecture": "gpt2", "config": {"n_layer": 1, "n_embd": 16, "n_head": 2}},
    "data": {"source": "files", "files": ["text/*.txt"], "sequence_length": 16, "packing": "padded"},
}


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Read PLAIN and SMALL with changes (None deletes a key), in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for number in range(60):
        (tmp_path / "text" / f"{number:02}.txt").write_text("abcdefghijklmnopqrstuvwxyz"[: 2 + number % 20])

    def read(changes: Any = None, small: Any = None, **arguments: Any) -> PreparedCase:
        written = {key: value for key, value in (PLAIN | (changes or {})).items() if value is not None}
        (tmp_path / "steps.json").write_text(json.dumps(written))
        (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL | (small or {})))
        named = {"experiment": Path("small.yaml"), "ranks": 2, **arguments}
        return read_case(VerifyArguments(deepspeed=Path("steps.json"), **named))

    return read


def on(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    schema: DeepSpeedSchema = dataclasses.replace(installed_schema(), machine=machine)
    monkeypatch.setattr(inputs, "installed_schema", lambda: schema)


def test_case_holds_what_the_ranks_need(prepare) -> None:
    prepared = prepare({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}, remedies=False)
    case = pickle.loads(pickle.dumps(prepared.case))
    assert (case.batch.world_size, case.batch.accumulation_steps, case.batch.micro_batch) == (2, 3, 2)
    assert (case.config[E], case.config[N], case.config[B]) == (12, 3, 2)
    assert (case.zero_stage, case.precision, case.accumulation_dtype) == (1, "bf16", "bf16")
    assert (case.gradient_clipping, case.remedies, case.fault, case.loop) == (1.0, False, None, "dsaccum")
    assert case.source == "small.yaml"
    assert [(choice.index, choice.probe) for choice in case.windows] == [(0, True), (1, False), (2, True)]
    assert prepared.parameters == sum(parameter.numel() for parameter in prepared.model.parameters())
    assert prepared.loss is None
    assert prepared.data["documents"] == 60
    for rank in range(2):
        for step in range(3):
            assert [len(batch["labels"]) for batch in case_stream(case, rank).window(step)] == [2, 2, 2]


def test_samples_and_model_are_those_of_training(prepare) -> None:
    prepared = prepare()
    case = prepared.case
    data = load_data(case.experiment.data, "small.yaml")
    held = case.samples.lengths > 0
    assert held.sum() > 24
    for index in held.nonzero()[0]:
        assert case.samples[index][0].tolist() == data.samples[index][0].tolist()
        assert case.samples[index][1].tolist() == data.samples[index][1].tolist()
    again = build_model(
        case.experiment.model, vocabulary_size=case.vocabulary.size, sequence_length=16, seed=0, end_token=1,
        pad_token=0, source="x",
    )  # fmt: skip
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, prepared.model.state_dict()[name])
    assert prepared.model.training


def test_what_set_brought_in_is_said_of_set(prepare) -> None:
    """The file holds no such line, so it is not to blame; a mistake of its own still is."""
    with pytest.raises(ConfigError, match=r"^--set: model\.config\.n_layers = 2: .*did you mean n_layer\?"):
        prepare(overrides=("model.config.n_layers=2",))
    with pytest.raises(ConfigError, match=r"^small\.yaml: model\.config\.n_layers"):
        prepare({}, {"model": {"architecture": "gpt2", "config": {"n_layers": 2}}}, overrides=("run.seed=2",))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("path", JSONS, ids=lambda path: path.stem)
def test_shipped_files_are_read_without_a_warning(path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    prepared = read_case(VerifyArguments(deepspeed=path, ranks=ranks))
    assert prepared.case.source == "launch/experiments/stdlib-nano.yaml"
    about_one_micro_step = ["N = 1: nothing is accumulated"] if path.stem == "accum1" else []
    assert [warning.partition(",")[0] for warning in prepared.warnings] == about_one_micro_step
    kinds = {note.split()[0] for note in prepared.substitutions}
    assert kinds == {"a"} | ({"buckets"} if prepared.case.zero_stage else set()), "a shrunk copy, small buckets"


def test_without_an_experiment_it_works_anywhere(prepare) -> None:
    """Hugging Face's usual JSON: nearly everything "auto"; and no word on what the built-in experiment has unasked."""
    auto = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True}
    warmup = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
    huggingface = {
        E: "auto",
        N: "auto",
        B: "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": auto},
        "scheduler": {"type": "WarmupLR", "params": warmup},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": True},
        "steps_per_print": 10,
        "wall_clock_breakdown": False,
    }
    with pytest.raises(ConfigError, match="pass --accum-steps N --micro-batch B"):
        prepare(huggingface, experiment=None)
    prepared = prepare(huggingface, experiment=None, accumulation_steps=3, micro_batch=2)
    assert prepared.case.source.endswith("default_experiment.yaml")
    assert prepared.case.batch.total == 12
    assert prepared.warnings == []
    assert "steps_per_print" not in prepared.case.config
    assert "auto" not in json.dumps(prepared.case.config)
    assert prepare(experiment=None).warnings == []
    # Negative control: an experiment that the user names is held to what it says.
    unused = prepare({}, {"auto": {"eps": 1e-8}}).warnings
    assert [warning.split()[0] for warning in unused] == ["auto.eps"]


def test_ranks_default_to_two_at_most(prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, ranks in ((1, 1), (2, 2), (64, 2)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert prepare(ranks=None).case.batch.world_size == ranks
    on(Machine(device="cuda", has_compiler=True, supports_fp16=True), monkeypatch)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert prepare(ranks=None).case.batch.world_size == 1
    with pytest.raises(ConfigError, match=r"--ranks = 2: is more than there are GPUs.*fix: --ranks 1"):
        prepare(ranks=2)


def test_what_is_substituted_is_said(prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    on(Machine(device="cpu", has_compiler=False, supports_fp16=False), monkeypatch)
    prepared = prepare({
        E: 24,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "fp16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    })  # fmt: skip
    assert [note.split()[0] for note in prepared.substitutions] == [
        "effective", "offload_optimizer", "fp16", "FusedAdam", "buckets"
    ]  # fmt: skip
    assert prepared.case.config["optimizer"]["params"] == {"lr": 1e-3, "torch_adam": True, "weight_decay": 0.0}
    assert prepared.case.precision == "fp32"


@pytest.mark.parametrize("compiler", [True, False])
def test_fused_adam_is_not_compiled_for_a_cpu(prepare, monkeypatch: pytest.MonkeyPatch, *, compiler: bool) -> None:
    """Not covered: a GPU, where it stays; see test_substitutions.py."""
    on(Machine(device="cpu", has_compiler=compiler, supports_fp16=False), monkeypatch)
    prepared = prepare({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}})
    [note] = prepared.substitutions
    assert note.startswith("FusedAdam would be compiled for this CPU")
    assert prepared.case.config["optimizer"]["params"]["torch_adam"] is True
    assert prepared.warnings == []


def test_steps_wait_for_a_warm_up_that_starts_at_zero(prepare) -> None:
    warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 4, "warmup_type": "linear"}}
    prepared = prepare({"scheduler": warmup}, steps=2)
    assert len(prepared.case.windows) == 4, "DeepSpeed's first two updates are at rate 0"
    assert any("exactly 0 at the first 2 updates" in warning for warning in prepared.warnings)


def test_a_large_model_is_shrunk_with_its_data_and_its_buckets(prepare) -> None:
    model: dict[str, Any] = {"architecture": "gpt2", "config": {"n_layer": 24, "n_embd": 1024, "n_head": 16}}
    data = SMALL["data"] | {"sequence_length": 256}
    zero = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 100_000}}
    prepared = prepare(zero, {"model": model, "data": data})
    [shrunk, buckets] = prepared.substitutions
    assert shrunk.startswith("a shrunk copy is verified: 2 of 24 layers, width ")
    assert buckets.startswith("buckets sized to the model: ")
    case = prepared.case
    section = case.config["zero_optimization"]
    largest = max(parameter.numel() for parameter in prepared.model.parameters())
    assert section["stage3_param_persistence_threshold"] < largest
    # A third, rounded up to a multiple of 2 W.
    assert 0 <= section["reduce_bucket_size"] * 3 - prepared.parameters <= 3 * 2 * case.batch.world_size
    assert case.experiment.data.sequence_length == case.samples.sequence_length
    model["config"]["n_layer"] = 3
    assert prepare({}, {"model": model, "data": data}).substitutions
    assert prepare({}, {"model": model, "data": data}, full_size=True).substitutions == []


def test_rows_are_cut_where_the_copy_is_shorter(prepare) -> None:
    (Path("big.py")).write_text(
        "from transformers import AutoConfig, AutoModelForCausalLM\n"
        "def build(vocabulary_size, sequence_length):\n"
        "    sizes = dict(n_layer=1, n_embd=512, n_head=2, n_positions=sequence_length, vocab_size=vocabulary_size)\n"
        "    return AutoModelForCausalLM.from_config(AutoConfig.for_model('gpt2', **sizes))\n"
    )
    data = SMALL["data"] | {"sequence_length": 256}
    prepared = prepare({}, {"model": {"factory": "big.py:build"}, "data": data}, accumulation_steps=4)
    [note] = prepared.substitutions
    assert note.startswith("shorter rows are verified: ")
    length = prepared.case.experiment.data.sequence_length
    assert length < 256
    assert prepared.case.samples.lengths.max() <= length
    window = case_stream(prepared.case, 0).window(1)
    assert max(batch["input_ids"].shape[1] for batch in window) <= length


def test_own_losses_are_built_and_models_then_not_judged_by_ours(prepare) -> None:
    Path("mine.py").write_text(
        "class Loss:\n"
        "    def count(self, micro_batch): return len(micro_batch['labels'])\n"
        "    def sum(self, outputs, micro_batch): return outputs.logits.square().mean((1, 2)).sum()\n"
        "def build(): return Loss()\n"
    )
    prepared = prepare({}, {"loss": {"factory": "mine.py:build"}})
    assert prepared.loss is not None
    assert prepared.loss.count({"labels": [0, 0, 0]}) == 3
    seeing = {"architecture": "bert", "config": {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}}
    assert prepare({}, {"loss": {"factory": "mine.py:build"}, "model": seeing}).loss is not None
    with pytest.raises(ConfigError, match="sees the tokens that it should predict"):
        prepare({}, {"model": seeing})


@pytest.mark.parametrize(
    ("changes", "small", "said"),
    [
        ({E: 10}, {}, r"steps.json: train_batch_size = 10: is no multiple of .* = 6"),
        (
            {"gradient_accumulation_step": 4},
            {},
            r"steps.json: gradient_accumulation_step: DeepSpeed .* knows no such key",
        ),
        ({"gradient_clipping": None}, {}, r"steps.json: gradient_clipping: is missing"),
        (
            {"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}},
            {},
            r"steps.json: .*Lamb.* has no CPU implementation",
        ),
        ({"fp16": {"enabled": True}}, {}, r"steps.json: fp16.enabled = true: at ZeRO 0"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, {}, r"the experiment has no value for it"),
        ({}, {"model": {"architecture": "gpt3"}}, r"small.yaml: model.architecture"),
        (
            {B: 500},
            {"data": SMALL["data"] | {"last_window": "drop"}},
            r"small.yaml: data.last_window .* fewer than the",
        ),
    ],
)
def test_mistakes_are_one_line_with_their_file(prepare, changes: Any, small: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        prepare(changes, small)
