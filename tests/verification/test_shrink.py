"""A shrunk copy has the architecture of its original, less of everything, and works.

Run: pytest -n 0 tests/verification/test_shrink.py. Not covered: how long the reference really takes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dsaccum.batch import EffectiveBatch
from dsaccum.config.errors import ConfigError
from dsaccum.config.experiment import DataConfig, Experiment, ModelConfig
from dsaccum.model import build_model
from dsaccum.verification.cases import shrink, smaller_config
from dsaccum.verification.cases.case import Vocabulary
from dsaccum.verification.cases.shrink import Fitted, Patience, Work, fit_model

BYTES = Vocabulary(size=384, end_token=1, pad_token=0)
MOST, WANTED = 8.0, 1.0
"""Seconds of work; the product's own numbers are free to change without a new set of expected sizes here."""
PATIENCE = Patience(MOST, WANTED)
WORK = Work(EffectiveBatch(world_size=2, accumulation_steps=4, micro_batch=4), 3, PATIENCE)
LENGTHS = [128, 64, 32, 16]
# Sizes as in smaller published models: several layers, several heads, whatever each has of its own.
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt_neox": {"num_hidden_layers": 6, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048},
    "llama": {"num_hidden_layers": 16, "num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 16, "use_sliding_window": True, "max_window_layers": 8},
    "qwen3": {},
    "opt": {"hidden_size": 1024, "word_embed_proj_dim": 512, "num_attention_heads": 16},
    "mistral": {},
    "mixtral": {},
    "gemma": {},
    "gemma2": {},
    "phi": {},
    "falcon": {},
    "bloom": {"hidden_size": 1024, "n_layer": 24, "n_head": 16},
    "gptj": {},
    "qwen3_moe": {"num_experts_per_tok": 2},
    "deepseek_v3": {},
    "mamba": {},
}


def experiment_of(architecture: str = "gpt2", length: int = 256, **config: Any) -> Experiment:
    model = ModelConfig(architecture=architecture, config=config)
    return Experiment(name="x", model=model, data=DataConfig(sequence_length=length))


def fit(experiment: Experiment, *, vocabulary: Vocabulary = BYTES, full_size: bool = False, **work: Any) -> Fitted:
    return fit_model(
        experiment,
        vocabulary,
        Work(**work, patience=PATIENCE) if work else WORK,
        LENGTHS,
        "x.yaml",
        full_size=full_size,
    )


def seconds(fitted: Fitted) -> float:
    return WORK.seconds(fitted.parameters, fitted.experiment.data.sequence_length)


@pytest.mark.parametrize("architecture", SIZES)
def test_copy_is_the_same_architecture_and_trains(architecture: str) -> None:
    fitted = fit(experiment_of(architecture, **SIZES[architecture]))
    config: Any = fitted.model.config
    assert config.model_type == architecture
    assert fitted.whole > 10 * fitted.parameters
    assert seconds(fitted) <= WANTED
    assert config.num_hidden_layers == 2
    assert config.vocab_size == 384
    [note] = fitted.notes
    assert note.startswith("a shrunk copy is verified: 2 of ")
    assert note.endswith("; --full-size verifies the whole model")
    ids = torch.randint(3, 259, (2, 16), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    fitted.model(input_ids=ids, attention_mask=mask).logits.sum().backward()
    assert any(parameter.grad is not None for parameter in fitted.model.parameters())


def test_kinds_of_heads_experts_and_layers_stay() -> None:
    llama: Any = fit(experiment_of("llama", num_key_value_heads=16)).model.config
    assert (llama.num_attention_heads, llama.num_key_value_heads) == (4, 2), "two queries share a key, as before"
    assert llama.head_dim * 4 == llama.hidden_size
    gemma: Any = fit(experiment_of("gemma")).model.config
    assert gemma.head_dim * 4 > gemma.hidden_size, "Gemma's attention is wider than its stream"
    gemma2: Any = fit(experiment_of("gemma2")).model.config
    assert gemma2.layer_types == ["sliding_attention", "full_attention"]
    qwen: Any = fit(experiment_of("qwen2", **SIZES["qwen2"])).model.config
    assert qwen.layer_types == ["full_attention", "sliding_attention"], "the second kind begins at layer 9 only"
    mixtral: Any = fit(experiment_of("mixtral")).model.config
    assert (mixtral.num_local_experts, mixtral.num_experts_per_tok) == (8, 2)
    deepseek: Any = fit(experiment_of("deepseek_v3")).model.config
    assert deepseek.first_k_dense_replace == 1, "a dense layer, and one with experts"
    opt: Any = fit(experiment_of("opt", **SIZES["opt"])).model.config
    assert opt.word_embed_proj_dim * 2 == opt.hidden_size


def test_what_is_fast_enough_is_left_as_it_is() -> None:
    experiment = experiment_of("gpt2", n_layer=4, n_embd=192, n_head=4)
    one_rank = {"batch": EffectiveBatch(1, 4, 2), "steps": 3}
    fitted = fit(experiment, **one_rank)
    assert Work(**one_rank).seconds(fitted.parameters, 256) < MOST
    assert fitted.experiment is experiment
    assert (fitted.notes, fitted.share) == ((), 1.0)
    # Negative control: on two ranks a window is twice as long, and too much.
    assert fit(experiment, batch=EffectiveBatch(2, 4, 2), steps=3).notes


def test_layers_go_first_then_width_then_length() -> None:
    assert fit(experiment_of("gpt2", n_layer=12, n_embd=128, n_head=4)).notes == (
        "a shrunk copy is verified: 2 of 12 layers, width 32 of 128; --full-size verifies the whole model",
    )
    assert fit(experiment_of("gpt2", n_layer=40, n_embd=40, n_head=4)).notes == (
        "a shrunk copy is verified: 2 of 40 layers; --full-size verifies the whole model",
    )
    large = Vocabulary(size=10_000, end_token=1, pad_token=0)
    fitted = fit(experiment_of("gpt2"), vocabulary=large)
    assert fitted.notes == (
        "a shrunk copy is verified: 2 of 12 layers, width 32 of 768, 32 of 256 tokens; "
        "--full-size verifies the whole model",
    )
    assert fitted.model.config.vocab_size == 10_000
    assert fitted.model.config.n_positions == 32


def test_full_size_is_full_size() -> None:
    experiment = experiment_of("gpt2", n_layer=12, n_embd=128, n_head=4)
    fitted = fit(experiment, full_size=True)
    assert fitted.experiment is experiment
    assert fitted.model.config.n_layer == 12
    assert fitted.notes == ()


def test_the_users_own_names_of_fields_give_way() -> None:
    fitted = fit(experiment_of("gpt2", num_hidden_layers=12, hidden_size=256, num_attention_heads=8, n_positions=512))
    assert fitted.experiment.model.config == {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 512}


@pytest.mark.parametrize("broken", ["width", "layers"])
def test_a_cut_that_does_not_work_is_left_out(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    if broken == "width":
        monkeypatch.setattr(shrink, "narrower", lambda config, width: {"n_embd": width + 1})  # not divisible by heads
    else:
        monkeypatch.setattr(shrink, "fewer_layers", lambda config: {"activation_function": "none such"})
    fitted = fit(experiment_of("gpt2"))
    config: Any = fitted.model.config
    assert (config.n_layer, config.n_embd) == ((2, 768) if broken == "width" else (12, 32))
    assert seconds(fitted) < WORK.seconds(fitted.whole, 256)


def test_where_no_cut_works_rows_get_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shrink, "_working_model", lambda experiment, build: None)
    fitted = fit(experiment_of("gpt2", length=512, n_layer=2, n_embd=128, n_head=4))
    assert fitted.model.config.n_embd == 128
    assert fitted.notes == (
        "shorter rows are verified: 32 of 512 tokens; this architecture keeps its size; "
        "--full-size verifies whole rows",
    )


def test_what_no_memory_holds_is_refused_before_it_is_built() -> None:
    with pytest.raises(ConfigError, match=r"19\.9 billion parameters on 2 ranks need more than the"):
        fit(experiment_of("gpt_neox"), full_size=True)


def test_mistakes_in_the_model_are_the_users_to_mend() -> None:
    with pytest.raises(ConfigError, match="GPT2Config has no such field"):
        fit(experiment_of("gpt2", n_layers=2))
    with pytest.raises(ConfigError, match="transformers cannot build this model"):
        fit(experiment_of("gpt2", n_head=7))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        fit(Experiment(name="x", model=ModelConfig(pretrained="/nowhere"), data=DataConfig(tokenizer="bytes")))


def test_pretrained_models_keep_their_architecture_but_not_their_weights(tmp_path: Path) -> None:
    saved = build_model(
        ModelConfig(architecture="gpt2", config={"n_layer": 4, "n_embd": 192, "n_head": 4, "n_inner": 700}),
        vocabulary_size=400, sequence_length=300, seed=7, end_token=1, pad_token=0, source="x",
    )  # fmt: skip
    saved.config.resid_pdrop = 0.1  # type: ignore[union-attr]
    saved.save_pretrained(tmp_path)
    model = ModelConfig(pretrained=str(tmp_path), config={"num_hidden_layers": 4}, activation_checkpointing=True)
    experiment = Experiment(name="x", model=model, data=DataConfig(tokenizer="bytes"))
    small = fit(experiment)
    config: Any = small.model.config
    assert (config.vocab_size, config.n_layer, config.n_embd, config.n_inner) == (400, 2, 32, 120)
    assert config.resid_pdrop == 0.0, "dropout is off, as it is in the whole model"
    assert small.model.is_gradient_checkpointing
    assert small.notes == (
        "a shrunk copy is verified: 2 of 4 layers, width 32 of 192, with random weights; "
        "--full-size verifies the whole model",
    )
    whole = fit(experiment, full_size=True)
    assert whole.whole == small.whole
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, saved.state_dict()[name]), "the real weights"


FACTORY = """
import torch
from torch import nn
from types import SimpleNamespace

class Model(nn.Module):
    def __init__(self, vocabulary_size, sequence_length):
        super().__init__()
        self.words = nn.Embedding(vocabulary_size, 2000)
        self.positions = nn.Embedding(sequence_length, 2000)
        self.out = nn.Linear(2000, vocabulary_size)

    def forward(self, input_ids, attention_mask=None):
        places = torch.arange(input_ids.shape[1])
        return SimpleNamespace(logits=self.out(self.words(input_ids) + self.positions(places)))

def build(vocabulary_size, sequence_length):
    return Model(vocabulary_size, sequence_length)

def stubborn(vocabulary_size, sequence_length):
    assert sequence_length == 256, "256 or nothing"
    return Model(vocabulary_size, sequence_length)
"""


def test_a_factory_gets_shorter_rows_or_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FACTORY)

    def fitted(name: str) -> Fitted:
        return fit(Experiment(name="x", model=ModelConfig(factory=f"{tmp_path}/mine.py:{name}")))

    shorter = fitted("build")
    assert shorter.notes == (
        "shorter rows are verified: 16 of 256 tokens; a model.factory keeps its size; --full-size verifies whole rows",
    )
    positions: Any = shorter.model.positions
    assert isinstance(positions, nn.Embedding)
    assert positions.num_embeddings == 16
    alone = fitted("stubborn")
    assert alone.notes == ()
    assert alone.experiment.data.sequence_length == 256


def test_layer_lists_are_cut_with_their_layers() -> None:
    class Config:
        attribute_map: dict[str, str] = {}  # noqa: RUF012
        num_hidden_layers = 6
        kinds = ["a", "a", "b", "a", "c", "a"]  # noqa: RUF012
        numbers = [0, 1, 2, 3, 4, 5]  # noqa: RUF012
        pair = [1, 2]  # noqa: RUF012

        def to_dict(self) -> dict[str, Any]:
            return {"kinds": self.kinds, "numbers": self.numbers, "pair": self.pair}

    assert smaller_config.fewer_layers(Config()) == {"num_hidden_layers": 3, "kinds": ["a", "b", "c"]}
