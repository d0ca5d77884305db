"""Building models: any architecture, strict overrides, no dropout, ties kept, one line for each mistake.

Run: pytest tests/model. Not covered: hub ids (no network); the loading code is the same as for a directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dsaccum.config.errors import ConfigError
from dsaccum.config.experiment import ModelConfig
from dsaccum.model import build_model

TINY = {
    "gpt2": {"n_layer": 2, "n_head": 2, "n_embd": 16},
    "llama": {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2},
    "gpt_neox": {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2},
    "opt": {"num_hidden_layers": 2, "hidden_size": 16, "ffn_dim": 32, "num_attention_heads": 2},
}


def build(seed: int = 0, vocabulary_size: int = 60, sequence_length: int = 12, **model: Any) -> torch.nn.Module:
    return build_model(
        ModelConfig(**model), vocabulary_size=vocabulary_size, sequence_length=sequence_length, seed=seed, end_token=1,
        pad_token=0, source="x.yaml",
    )  # fmt: skip


@pytest.mark.parametrize("architecture", TINY)
def test_any_architecture_is_built_to_the_data(architecture: str) -> None:
    model = build(architecture=architecture, config=TINY[architecture])
    tokens = torch.randint(60, (2, 12))
    assert model(input_ids=tokens).logits.shape == (2, 12, 60)
    assert model.training
    dropouts = {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
    assert dropouts <= {0.0}
    assert torch.equal(model(input_ids=tokens).logits, model(input_ids=tokens).logits), (
        "nothing random in training mode"
    )


def test_dropout_comes_back_when_asked_for() -> None:
    """Control for the zeros above."""
    model = build(architecture="gpt2", config={**TINY["gpt2"], "resid_pdrop": 0.3})
    assert 0.3 in {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}


def test_equal_seeds_give_equal_weights() -> None:
    first, second, other = (build(seed, architecture="gpt2", config=TINY["gpt2"]) for seed in (3, 3, 4))
    same = [torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)]
    assert all(same)
    assert not torch.equal(first.transformer.wte.weight, other.transformer.wte.weight)


def test_tied_weights_stay_tied() -> None:
    model = build(architecture="gpt2", config=TINY["gpt2"])
    assert model.lm_head.weight is model.transformer.wte.weight


def test_activation_checkpointing_gives_the_same_gradients() -> None:
    """Exactly: the recomputed forward does the same operations on the same numbers."""
    tokens, gradients = torch.randint(60, (2, 12)), []
    for recompute in (False, True):
        model = build(architecture="gpt2", config=TINY["gpt2"], activation_checkpointing=recompute)
        assert model.is_gradient_checkpointing is recompute
        model(input_ids=tokens).logits.logsumexp(-1).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(plain, recomputed) for plain, recomputed in zip(*gradients, strict=True))


def test_a_saved_model_is_loaded(tmp_path: Path) -> None:
    saved = build(architecture="gpt2", config=TINY["gpt2"])
    saved.save_pretrained(tmp_path)
    loaded = build(pretrained=str(tmp_path))
    assert torch.equal(loaded.transformer.wte.weight, saved.transformer.wte.weight)


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    """A layer without weights would start at random, without a word."""
    build(architecture="gpt2", config=TINY["gpt2"]).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"holds no weights for transformer\.h\.2"):
        build(pretrained=str(tmp_path), config={"n_layer": 3})


def test_a_factory_is_called_with_the_data_s_sizes(tmp_path: Path) -> None:
    file = tmp_path / "models.py"
    file.write_text(
        "import torch\ndef make(vocabulary_size, sequence_length): return torch.nn.Linear(vocabulary_size, 2)"
    )
    assert build(factory=f"{file}:make").in_features == 60


@pytest.mark.parametrize("precision", ["bfloat16", "float64"])
def test_a_factory_s_parameters_are_float32(tmp_path: Path, precision: str) -> None:
    """DeepSpeed would train others as they are, without a float32 master, whatever its JSON says."""
    file = tmp_path / "models.py"
    file.write_text(f"import torch\ndef make(**_): return torch.nn.Linear(2, 2, bias=False, dtype=torch.{precision})")
    with pytest.raises(ConfigError, match=rf"model\.factory.* its parameter weight is {precision}; allowed: .*float32"):
        build(factory=f"{file}:make")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"architecture": "gtp2"}, ["model.architecture", "architecture: gpt2"]),
        ({"architecture": "gpt2", "config": {"n_layers": 2}}, ["model.config.n_layers", "did you mean n_layer?"]),
        (
            {"architecture": "gpt2", "config": {"n_embd": 15, "n_head": 2}},
            ["model.config", "transformers cannot build"],
        ),
        ({"architecture": "gpt2", "config": {"vocab_size": 50}}, ["model.config.vocab_size", "at least 60"]),
        ({"architecture": "gpt2", "config": {"n_positions": 8}}, ["data.sequence_length", "sequence_length: 8"]),
        ({"pretrained": "/no/such/directory"}, ["model.pretrained", "cannot be loaded"]),
        ({"factory": "/no/such/file.py:make"}, ["model.factory", "there is no such file"]),
    ],
)
def test_a_mistake_is_one_line(model: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build(**model)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in ["x.yaml", *words]), message
