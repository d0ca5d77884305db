"""Gradients that the target tokens don't tell of: other terms of the loss, and statistics of a micro-batch.

Run: pytest tests/watch/test_beside_tokens.py. Each is no proof of anything, and a mistake beside it is found as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsaccum.verification.records.watch import WindowRecord
from dsaccum.watch.beside_tokens import own_statistics, share_beside
from dsaccum.watch.session import Session
from tests.watch.odd_models import WIDTH, WINDOW, Model, cross_entropy, micro_batches, train
from tests.watch.running import only_window


class Routed(Model):
    """Returns what a router says beside the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)

    def forward(self, x: Any, **_: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        values = self.embed(x)
        gates = self.router(values).softmax(dim=-1)
        return self.head(values * gates.max(dim=-1, keepdim=True).values), gates


class OwnLoss(Model):
    """Returns its loss and the logits, and takes the labels with the words."""

    def forward(self, x: Any, **_: Any) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        values = self.embed(x)
        logits = self.head(values)
        return cross_entropy(logits[:, :-1], x[:, 1:]), logits, values


def look(script: Callable[[], nn.Module]) -> WindowRecord:
    session = Session(report=lambda record: None)
    try:
        torch.manual_seed(5)
        script()
    finally:
        session.end()
    return only_window(session.record)


def routed(divided_by: float, *, coefficient: float = 0.1) -> nn.Module:
    """The loss of the router is not divided."""
    model = Routed()
    optimizer = torch.optim.AdamW(model.parameters())
    for number, (x, labels) in enumerate(micro_batches(5 * WINDOW)):
        logits, gates = model(x)
        (cross_entropy(logits, labels) / divided_by + coefficient * gates.mean((0, 1)).square().sum()).backward()
        if number % WINDOW == WINDOW - 1:
            optimizer.step()
            optimizer.zero_grad()
    return model


class Normalised(nn.Module):
    def __init__(self, kind: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm = kind(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


def normalised(kind: Callable[[int], nn.Module], *, evaluating: bool = False, divided: bool = True) -> nn.Module:
    model = Model(Normalised(kind))
    model.middle.train(not evaluating)
    return train(model, loss=lambda logits, labels: cross_entropy(logits, labels) * (1 if divided else WINDOW))


def test_another_term_past_the_logits_leaves_the_verdict_open() -> None:
    window = look(lambda: routed(WINDOW))
    assert window.verdict is None
    assert window.claims.which("fail") == []
    assert "another term of the loss than the tokens'" in window.reasons["weighting"]


def test_a_term_that_moves_little_but_a_tensor_of_its_own_is_seen() -> None:
    assert look(lambda: routed(WINDOW, coefficient=1e-3)).verdict is None


def test_without_the_term_the_same_model_is_right_and_undivided_it_is_wrong() -> None:
    assert look(lambda: routed(WINDOW, coefficient=0.0)).verdict == "equivalent"
    wrong = look(lambda: routed(1.0))
    assert [each.id for each in wrong.causes] == ["loss-not-scaled"]


def test_outputs_that_lead_to_the_tokens_or_from_them_are_no_other_term() -> None:
    window = look(lambda: train(OwnLoss(), call=lambda model, x: model(x)[0], loss=lambda loss, _: loss))
    assert window.verdict == "equivalent", window.reasons


def test_statistics_of_a_micro_batch_leave_the_verdict_open() -> None:
    window = look(lambda: normalised(nn.BatchNorm1d))
    assert (window.verdict, window.claims.which("fail")) == (None, [])
    assert window.reasons["weighting"].startswith("middle.norm (BatchNorm1d) normalises each micro-batch")
    wrong = look(lambda: normalised(nn.BatchNorm1d, divided=False))
    assert [each.id for each in wrong.causes] == ["loss-not-scaled"]


@pytest.mark.parametrize(("kind", "evaluating"), [(nn.BatchNorm1d, True), (nn.InstanceNorm1d, False)])
def test_fixed_statistics_and_those_of_a_row_are_right(kind: Any, evaluating: bool) -> None:
    assert look(lambda: normalised(kind, evaluating=evaluating)).verdict == "equivalent"


def test_ranks_brought_together_are_one_batch() -> None:
    modes = [True, True]
    one, other = nn.Sequential(nn.SyncBatchNorm(2)), nn.Sequential(nn.BatchNorm1d(2))
    assert own_statistics(one, modes, alone=True) is None
    assert own_statistics(one, modes, alone=False) == "0 (SyncBatchNorm)"
    assert own_statistics(other, modes, alone=True) == "0 (BatchNorm1d)"
    assert own_statistics(other, [True, False], alone=True) is None
    no_statistics = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False))
    assert own_statistics(no_statistics, [True, False], alone=True) == "0 (BatchNorm1d)"


def test_a_share_is_of_the_whole_and_rounding_is_none() -> None:
    whole = {"large": torch.full((4,), 1.0), "small": torch.full((4,), 1e-3)}
    assert share_beside(whole, whole) == 0.0
    assert share_beside(whole, {**whole, "large": whole["large"] + 1e-6}) == 0.0
    assert share_beside(whole, {**whole, "small": whole["small"] * 0.9}) == pytest.approx(1e-4, rel=1e-3)
    assert share_beside(whole, {"small": whole["small"]}) == pytest.approx(1.0, rel=1e-3)
    assert share_beside({}, {}) == 0.0
