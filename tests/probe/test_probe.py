"""The look at a model before training: models that next-token cross entropy does not train are refused.

Run: pytest tests/probe. Not covered: models too large for two forwards on the CPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsaccum.config.errors import ConfigError
from dsaccum.probe import check_causal_language_model
from tests.cases import LENGTH, VOCABULARY, tiny_gpt
from tests.model.test_model import TINY, build

MIXTRAL = {
    "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_local_experts": 4,
}  # fmt: skip
BERT = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}


class Wrapped(torch.nn.Module):
    """A GPT with something wrong, or nothing."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.gpt, self.change = tiny_gpt(), change

    def forward(self, input_ids, labels=None):
        return self.change(self.gpt(input_ids=input_ids, labels=labels))


def add_loss(outputs):
    return SimpleNamespace(logits=outputs.logits, loss=None if outputs.loss is None else outputs.loss + 0.001)


def refusal(model: torch.nn.Module, vocabulary: int = VOCABULARY, length: int = LENGTH) -> str | None:
    try:
        check_causal_language_model(model, vocabulary, length, "x.yaml")
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("architecture", TINY)
@pytest.mark.parametrize("length", [2, 12])
def test_causal_models_pass(architecture: str, length: int) -> None:
    model = build(architecture=architecture, config=TINY[architecture], sequence_length=12)
    assert refusal(model, 60, length) is None
    assert model.training, "left as it was"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (add_loss, "adds a loss of its own"),
        (lambda outputs: SimpleNamespace(logits=outputs.logits.flip(1), loss=None), "sees the tokens that it should"),
        (lambda outputs: SimpleNamespace(loss=None), "its forward fails"),
        (lambda outputs: SimpleNamespace(logits=outputs.logits[:, 0]), "its logits have shape"),
    ],
)
def test_what_cross_entropy_does_not_train_is_refused(change: Any, words: str) -> None:
    message = refusal(Wrapped(change))
    assert message is not None
    assert words in message
    assert "\n" not in message


def test_an_unchanged_model_passes() -> None:
    """Control for the wrapper above."""
    assert refusal(Wrapped(lambda outputs: outputs)) is None


def test_an_encoder_is_refused_until_it_is_a_decoder() -> None:
    assert "is_decoder: true" in (refusal(build(architecture="bert", config=BERT), 60, 12) or "")
    assert refusal(build(architecture="bert", config={**BERT, "is_decoder": True}), 60, 12) is None


def test_a_router_s_loss_is_noticed() -> None:
    assert refusal(build(architecture="mixtral", config=MIXTRAL), 60, 12) is None, "control: switched off by default"
    with_router_loss = build(architecture="mixtral", config={**MIXTRAL, "output_router_logits": True})
    assert "adds a loss of its own" in (refusal(with_router_loss, 60, 12) or "")
