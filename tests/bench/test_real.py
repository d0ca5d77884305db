"""A bench on real ranks: figures that agree with each other, and a loss that no accumulation can get right.

Run: pytest -m "slow or not slow" tests/bench/test_real.py -n 0.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

from dsaccum.bench.record import BenchRecord
from dsaccum.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

NOT_ADDITIVE = """
class Squared:
    def count(self, micro_batch):
        return micro_batch["labels"].shape[0]

    def sum(self, outputs, micro_batch):
        return outputs.logits.float().mean() ** 2 * micro_batch["labels"].shape[0] * 100

def loss():
    return Squared()
"""


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("".join(f"line {number} of a small text\n" for number in range(2000)))
    experiment = {
        "name": "small",
        "model": {"architecture": "gpt2", "config": {"n_layer": 2, "n_embd": 64, "n_head": 2}},
        "data": {"source": "files", "files": ["text.txt"], "sequence_length": 64},
    }
    config = {
        "gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }  # fmt: skip
    (tmp_path / "e.yaml").write_text(yaml.safe_dump(experiment))
    (tmp_path / "ds.json").write_text(json.dumps(config))
    return tmp_path


def bench(*words: str) -> int:
    return main(
        ["bench", "--deepspeed", "ds.json", "--experiment", "e.yaml", "--rounds", "2", "--windows", "2", *words]
    )


def test_figures_agree_with_each_other(workplace: Path) -> None:
    assert bench("--ranks", "2", "--label", "mine", "--plot", "p.png") == 0
    record = BenchRecord.read(workplace / "bench-results/mine.json")
    assert [(each.accumulation_steps, each.micro_batch) for each in record.candidates] == [
        (1, 8),
        (2, 4),
        (4, 2),
        (8, 1),
    ]
    assert record.word == "accept"
    first = record.candidates[0]
    for each in record.candidates:
        assert each.update is not None
        assert each.update.verdict == "equivalent"
        assert each.loss is not None
        assert first.loss is not None
        assert math.isclose(each.loss, first.loss, rel_tol=1e-5), "the same weights, samples and number of updates"
        assert each.time is not None
        assert len(each.time.seconds) == 4
    peaks = [each.memory.by_category.activation or 0 for each in record.candidates if each.memory]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[1] < 0.6 * peaks[0]
    assert (workplace / "p.png").is_file()
    assert bench("--ranks", "2", "--label", "mine") == 2, "results are not overwritten"


def test_updates_that_differ_are_rejected(workplace: Path) -> None:
    (workplace / "own.py").write_text(NOT_ADDITIVE)
    words = ["--ranks", "1", "--json", "r.json", "--set", "loss.factory=own.py:loss", "--accum-steps", "1,4"]
    assert bench(*words) == 1
    record = BenchRecord.read(workplace / "r.json")
    assert record.word == "reject"
    assert "loss-not-additive" in record.reason


LIMITED = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel

class Limited(GPT2LMHeadModel):
    def forward(self, input_ids=None, **rest):
        if len(input_ids) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().forward(input_ids=input_ids, **rest)

def model(vocabulary_size, sequence_length):
    return Limited(GPT2Config(vocab_size=vocabulary_size, n_positions=sequence_length, n_embd=32, n_layer=1, n_head=2,
                              bos_token_id=1, eos_token_id=1))
"""


def test_a_big_batch_that_does_not_fit_leaves_the_others_comparable(workplace: Path) -> None:
    """Neither it nor what is compared with it runs; the memory and time of the splits that fit are measured."""
    (workplace / "limited.py").write_text(LIMITED)
    words = ["--ranks", "1", "--json", "r.json", "--set", "model={factory: 'limited.py:model'}"]
    assert bench(*words, "--accum-steps", "1,2,4") == 3
    record = BenchRecord.read(workplace / "r.json")
    big, *fitting = record.candidates
    assert big.failure is not None
    assert "OutOfMemoryError" in big.failure
    for each in fitting:
        assert each.failure is None
        assert each.memory is not None
        assert each.time is not None
        assert each.update is not None
        assert each.update.verdict is None
        assert "does not fit into memory here" in (each.update.reason or "")
