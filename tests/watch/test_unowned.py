"""Parameters that no optimizer has: told, and wrong where their gradients are never cleared and clipping counts them.

Run: pytest tests/watch/test_unowned.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dsaccum.verification.records.watch import WindowRecord
from tests.watch.odd_models import WIDTH, WINDOW, WORDS, Model, cross_entropy, micro_batches
from tests.watch.test_beside_tokens import look


def head_put_in_later(*, limit: float, clear_all: bool = False) -> WindowRecord:
    def script() -> nn.Module:
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters())
        model.head = nn.Linear(WIDTH, WORDS)
        for number, (x, labels) in enumerate(micro_batches(4 * WINDOW)):
            (cross_entropy(model(x), labels) / WINDOW).backward()
            if number % WINDOW == WINDOW - 1:
                nn.utils.clip_grad_norm_(model.parameters(), limit)
                optimizer.step()
                (model if clear_all else optimizer).zero_grad()
        return model

    return look(script)


def test_what_is_left_of_earlier_windows_is_no_part_of_the_norm() -> None:
    window = head_put_in_later(limit=0.01)
    assert window.claims.which("fail") == ["clipping"]
    [cause] = window.causes
    assert (cause.id, cause.confidence) == ("stale-gradients", "certain")
    assert cause.evidence["parameters"] == ["head.weight", "head.bias"]
    assert "give the parameters named here to the optimizer" in cause.fix


@pytest.mark.parametrize(("limit", "clear_all"), [(0.01, True), (1e3, False)], ids=["cleared", "clipping does nothing"])
def test_else_it_is_a_note(limit: float, clear_all: bool) -> None:
    window = head_put_in_later(limit=limit, clear_all=clear_all)
    assert window.verdict == "equivalent", window.reasons
    assert window.notes[0] == "2 parameters get a gradient and belong to no optimizer, and so won't move: head.weight"
