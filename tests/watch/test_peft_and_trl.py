"""peft's adapters under Trainer and TRL's SFTTrainer, watched: right scripts pass, and a second division is named.

Run: pytest tests/watch/test_peft_and_trl.py, where peft and trl are installed. Right and wrong runs are each other's
control. Not covered: TRL's other trainers, quantized base models.
"""

from __future__ import annotations

import pytest

from tests.watch.running import only_window, watched

pytest.importorskip("peft")

ADAPTERS = 2 * 2 * (4 * 32 + 4 * 32)
"""Two layers, query and value, rank 4 by 32, down and up."""


def _script(trainer: str, *words: str) -> list[str]:
    if trainer == "sft":
        pytest.importorskip("trl")
    return ["peft_trainer", "--trainer", trainer, *words]


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        ("hf", []),
        pytest.param("hf", ["--stage", "2", "--ragged"], marks=pytest.mark.slow),
        ("sft", ["--stage", "2", "--ragged"]),
        pytest.param("sft", ["--ragged"], marks=pytest.mark.slow),
        pytest.param("sft", ["--whole"], marks=pytest.mark.slow),
    ],
)
def test_right_scripts_pass(one_rank: object, trainer: str, words: list[str]) -> None:
    record = watched(*_script(trainer, *words))
    window = only_window(record)
    assert window.verdict == "equivalent", window.reasons
    assert window.claims.which("fail") == []
    assert record.engines[0].framework == {"hf": "Trainer", "sft": "TRL"}[trainer]
    if "--whole" not in words:
        assert record.engines[0].trained_parameters == ADAPTERS


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        ("hf", []),
        ("sft", ["--stage", "2", "--ragged"]),
        pytest.param("sft", [], marks=pytest.mark.slow),
    ],
)
def test_dividing_again_is_named(one_rank: object, trainer: str, words: list[str]) -> None:
    window = only_window(watched(*_script(trainer, *words, "--mistake", "divided-twice")))
    assert [(each.id, each.confidence) for each in window.causes] == [("loss-scaled-twice", "certain")]
    assert window.token_weights.sum == pytest.approx(0.25, rel=1e-6)
