"""The loss: a sum and a count that together give the token mean, in values and in gradients.

Run: pytest tests/loss. Not covered: the averaging over ranks (tests/training).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dsaccum.loss as loss_module
from dsaccum.config.errors import ConfigError
from dsaccum.loss import CausalLMLoss, build_loss, engine_divisor, model_inputs, window_count


def test_sum_over_count_is_the_mean_of_the_shifted_targets() -> None:
    """Hand-worked: 2 rows of 4 labels; row 1 has 3 targets after the shift, row 2 (one of them ignored) 2."""
    torch.manual_seed(0)
    logits = torch.randn(2, 4, 7, requires_grad=True)
    labels = torch.tensor([[5, 1, 2, 3], [6, 4, -100, 2]])
    loss, batch = CausalLMLoss(), {"labels": labels}
    assert loss.count(batch) == 5
    pairs = [(0, 0, 1), (0, 1, 2), (0, 2, 3), (1, 0, 4), (1, 2, 2)]  # (row, position, the token that comes next)
    by_hand = sum(-F.log_softmax(logits[row, position], 0)[token] for row, position, token in pairs)
    ours = loss.sum(SimpleNamespace(logits=logits), batch)
    assert ours.item() == pytest.approx(by_hand.item(), rel=1e-6)
    (gradient,) = torch.autograd.grad(ours, logits)
    (expected,) = torch.autograd.grad(by_hand, logits)
    assert torch.allclose(gradient, expected, atol=1e-6)
    assert (gradient[1, 1] == 0).all(), "no gradient where the next label is ignored"


def test_a_row_of_ignored_labels_adds_nothing() -> None:
    logits = torch.randn(1, 4, 7, requires_grad=True)
    batch = {"labels": torch.full((1, 4), -100)}
    loss = CausalLMLoss().sum(SimpleNamespace(logits=logits), batch)
    loss.backward()
    assert (loss.item(), CausalLMLoss().count(batch), float(logits.grad.abs().sum())) == (0.0, 0, 0.0)


def test_loss_is_formed_in_float32() -> None:
    logits = torch.randn(2, 4, 7).bfloat16()
    loss = CausalLMLoss().sum(SimpleNamespace(logits=logits), {"labels": torch.ones(2, 4, dtype=torch.long)})
    assert loss.dtype == torch.float32


def test_divisor_undoes_what_the_engine_does() -> None:
    """T = 60 targets, N = 4, W = 2: d = 7.5; the engine's 1/N and the mean over W make it 1/60 in all."""
    assert engine_divisor(60, accumulation_steps=4, world_size=2) == 7.5
    per_target = (1 / 7.5) / 4 / 2
    assert per_target == pytest.approx(1 / 60)
    assert 5.0 / engine_divisor(0, 4, 2) == 0.0, "a window without targets has gradient zero, not NaN"


def test_the_model_never_sees_labels() -> None:
    assert set(model_inputs({"input_ids": torch.ones(1), "labels": torch.ones(1)})) == {"input_ids"}


class Returning:
    """A loss of the user's that returns, or raises, what it is told."""

    def __init__(self, count: Any = 1, loss: Any = None) -> None:
        self._count, self._loss = count, loss

    def count(self, micro_batch: Any) -> Any:
        return self._given(self._count)

    def sum(self, outputs: Any, micro_batch: Any) -> Any:
        return self._given(self._loss)

    @staticmethod
    def _given(value: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value


@pytest.fixture
def returning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``returning(...)``: that loss as ``loss.factory`` would bring it."""

    def build(**values: Any) -> Any:
        monkeypatch.setattr(loss_module, "call_factory", lambda *_, **__: Returning(**values))
        return build_loss("losses.py:make", source="x.yaml")

    return build


@pytest.mark.parametrize(
    ("count", "problem"),
    [
        (0.5, "count returned 0.5; allowed: a whole number of at least 0"),
        (-1, "count returned -1"),
        (float("nan"), "count returned nan"),
        (torch.tensor(float("inf")), "count returned inf"),
        (torch.ones(2), "count returned a tensor of shape [2]"),
        (None, "count returned None"),
        (KeyError("mask"), "count raised KeyError: 'mask'"),
    ],
)
def test_only_whole_counts_are_taken(returning: Callable[..., Any], count: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        window_count(returning(count=count), [{}])
    assert f'x.yaml: loss.factory = "losses.py:make": {problem}' in str(caught.value)


def test_counts_of_a_window_add_up(returning: Callable[..., Any]) -> None:
    batch = {"labels": torch.ones(1, 3, dtype=torch.long)}
    assert window_count(CausalLMLoss(), [batch, batch]) == 4
    for count in (3, 3.0, torch.tensor(3)):
        assert window_count(returning(count=count), [{}, {}]) == 6


@pytest.mark.parametrize(
    ("loss", "problem"),
    [
        (0.0, "sum returned 0.0; allowed: a scalar tensor"),
        (torch.ones(3, requires_grad=True), "sum returned a tensor of shape [3]"),
        (torch.tensor(1.0), "sum returned a loss without a graph"),
        (RuntimeError("sizes differ"), "sum raised RuntimeError: sizes differ"),
    ],
)
def test_only_a_scalar_with_a_graph_is_a_loss(returning: Callable[..., Any], loss: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        returning(loss=loss).sum(None, {})
    assert problem in str(caught.value)


def test_a_loss_needs_a_graph_only_where_there_is_one(returning: Callable[..., Any]) -> None:
    scalar = torch.tensor(2.0, requires_grad=True)
    assert returning(loss=scalar).sum(None, {}) is scalar
    with torch.no_grad():
        assert returning(loss=torch.tensor(1.0)).sum(None, {}) == 1.0


def test_a_factory_states_another_loss(tmp_path: Path) -> None:
    file = tmp_path / "losses.py"
    file.write_text("class L:\n def count(self, b): return 1\n def sum(self, o, b): return 0\ndef make(): return L()\n")
    assert build_loss(f"{file}:make", source="x.yaml").count({}) == 1


@pytest.mark.parametrize(
    ("text", "function", "problem"),
    [
        ("def make(): return 3", "make", "it returned int, which has no method count and no sum"),
        ("def make(): return 3", "mak", "has no function 'mak'"),
        ("def make(): raise KeyError(3)", "make", "the function raised KeyError: 3"),
        ("import sys\ndef make(): sys.exit(0)", "make", "the function raised SystemExit: 0"),
        ("import nothing_like_this", "make", "cannot be imported (ModuleNotFoundError"),
    ],
)
def test_a_wrong_factory_is_one_line(tmp_path: Path, text: str, function: str, problem: str) -> None:
    file = tmp_path / "losses.py"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        build_loss(f"{file}:{function}", source="x.yaml")
    assert "loss.factory" in str(caught.value)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_memory_that_runs_out_is_no_mistake_of_the_factory(returning: Callable[..., Any]) -> None:
    """It is raised as it is: who can give way to it must know it."""
    for error in (torch.OutOfMemoryError("CUDA"), RuntimeError("DefaultCPUAllocator: can't allocate memory")):
        with pytest.raises(type(error)) as caught:
            returning(loss=error).sum(SimpleNamespace(), {})
        assert caught.value is error
