"""What a script puts into a gradient past the outputs, or takes out of it: told, and not judged.

Run: pytest tests/watch/test_past_outputs.py. Each has a mistake beside it, or one that looks like it, as its control.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dsaccum.verification.records.watch import WindowRecord
from tests.watch.odd_models import WINDOW, WORDS, Model, cross_entropy, micro_batches
from tests.watch.test_beside_tokens import look


def loop(
    *,
    divided_by: float = WINDOW,
    penalty: Callable[[nn.Module], Tensor | float] = lambda model: 0.0,
    each: Callable[[Model, int], None] = lambda model, number: None,
    end: Callable[[Model], None] = lambda model: None,
) -> WindowRecord:
    """One window of it; ``each`` is called after each backward, ``end`` before the step."""

    def script() -> nn.Module:
        model = Model(nn.Linear(16, 16))
        optimizer = torch.optim.Adam(model.parameters())
        for number, (x, labels) in enumerate(micro_batches(4 * WINDOW)):
            (cross_entropy(model(x), labels) / divided_by + penalty(model)).backward()
            each(model, number % WINDOW)
            if number % WINDOW == WINDOW - 1:
                end(model)
                optimizer.step()
                optimizer.zero_grad()
        return model

    return look(script)


def squares(model: nn.Module) -> Tensor:
    return sum(p.square().sum() for p in model.parameters() if p.dim() > 1) * 1e-3


def keep_old_words(model: Model) -> None:
    assert model.embed.weight.grad is not None
    model.embed.weight.grad[: WORDS // 2] = 0


def test_a_penalty_on_the_parameters_is_told() -> None:
    window = loop(penalty=squares)
    assert (window.verdict, window.claims.which("fail")) == (None, [])
    assert "0.008 times the parameters themselves" in window.reasons["gradient"]
    assert window.reasons["weighting"] == window.reasons["gradient"]


def test_a_loss_that_is_not_divided_is_named_beside_a_penalty() -> None:
    wrong = loop(penalty=squares, divided_by=1.0)
    assert [each.id for each in wrong.causes] == ["loss-not-scaled"]


def test_rows_that_are_to_stay_are_told() -> None:
    window = loop(end=keep_old_words)
    assert (window.verdict, window.claims.which("fail")) == (None, [])
    assert "elements of embed.weight are exactly 0, and the others what is due" in window.reasons["gradient"]


def test_a_loss_that_is_not_divided_is_named_beside_rows_that_stay() -> None:
    wrong = loop(end=keep_old_words, divided_by=1.0)
    assert [each.id for each in wrong.causes] == ["loss-not-scaled"]


def test_a_tensor_that_is_lost_is_no_mask() -> None:
    def all_of_it(model: Model) -> None:
        model.embed.weight.grad = torch.zeros_like(model.embed.weight)

    def but_the_last(model: Model, number: int) -> None:
        if number < WINDOW - 1:
            all_of_it(model)

    for wrong in (loop(end=all_of_it), loop(each=but_the_last)):
        assert wrong.verdict == "not_equivalent"
        assert [each.id for each in wrong.causes] == ["parameter-gradient-lost"]


def test_where_no_weights_fit_no_totals_are_stated() -> None:
    def disturb(model: Model) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad += 1e-2 * torch.randn_like(parameter)

    window = loop(end=disturb)
    assert (window.verdict, window.claims.which("fail")) == ("not_equivalent", ["gradient"])
    assert window.token_weights.sum is None
    assert "so tokens have none" in window.reasons["weighting"]
