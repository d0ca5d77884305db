"""Clipping that a script writes by hand: told, and not judged; a factor that is a mistake stays one.

Run: pytest tests/watch/test_hand_clipping.py.
"""

from __future__ import annotations

import pytest
import torch

from tests.watch.odd_models import WINDOW, Model
from tests.watch.test_past_outputs import loop


def multiply(model: Model, *, norm: float | None = None, factor: float = 1.0) -> None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if norm is not None:
        factor = norm / (float(torch.stack([g.square().sum() for g in gradients]).sum().sqrt()) + 1e-6)
    for gradient in gradients:
        gradient.mul_(factor)


def test_clipping_by_hand_is_told() -> None:
    window = loop(end=lambda model: multiply(model, norm=0.05))
    assert (window.verdict, window.claims.which("fail")) == (None, [])
    assert "the norm is 0.05 then: clipped by hand" in window.reasons["weighting"]


@pytest.mark.parametrize("factor", [1 / WINDOW, 0.3173])
def test_other_factors_are_wrong(factor: float) -> None:
    window = loop(end=lambda model: multiply(model, factor=factor))
    assert window.claims.which("fail") == ["weighting"], window.reasons


def test_a_round_norm_excuses_no_mistake_in_the_loss() -> None:
    window = loop(divided_by=3.0, end=lambda model: multiply(model, norm=0.05))
    assert window.claims.which("fail") == ["weighting"], window.reasons
