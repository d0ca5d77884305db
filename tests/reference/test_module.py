"""What a forward leaves behind reaches no later pass: buffers, caches, counters, replaced tensors, gradients.

Run: pytest tests/reference/test_module.py. The control: the same module, used without being put back, differs.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsaccum.reference import Reference
from dsaccum.reference_module import ReferenceModule


class Restless(nn.Module):
    """Each forward depends on all forwards before it, in every way that a module can remember."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(11, 6), nn.BatchNorm1d(6), nn.Linear(6, 11)
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("replaced", torch.zeros(1))
        self.calls, self.cache, self.history = 0, None, [1.0]
        self.by_name: dict[str, float] = {"factor": 1.0}

    def forward(self, input_ids: Tensor) -> Any:
        hidden = self.embedding(input_ids)
        hidden = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        self.calls += 1
        self.seen += 1
        self.replaced = self.replaced + 1
        self.cache = hidden.detach().mean() if self.cache is None else self.cache * 2
        self.history.append(2.0)
        self.by_name["factor"] *= 3
        self.by_name[f"call {self.calls}"] = 1.0
        remembered = self.calls + self.seen + self.replaced + self.cache + len(self.history) + self.by_name["factor"]
        return SimpleNamespace(logits=self.head(hidden) * remembered)


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


@pytest.fixture
def restless() -> Restless:
    torch.manual_seed(0)
    return Restless()


def test_every_pass_is_like_the_first(restless: Restless) -> None:
    reference = Reference(restless)
    first, second, third = (reference.measure(batch()) for _ in range(3))
    assert first.loss_sum == second.loss_sum == third.loss_sum
    assert first.gradient.keys() == dict(restless.named_parameters()).keys()
    for name, gradient in first.gradient.items():
        assert torch.equal(gradient, second.gradient[name]), name
    with torch.no_grad():
        control = [float(restless(batch()["input_ids"]).logits.sum()) for _ in range(2)]
    assert control[0] != control[1]


def test_the_model_that_was_given_is_left_alone(restless: Restless) -> None:
    before = {name: tensor.clone() for name, tensor in restless.state_dict().items()}
    Reference(restless, dtype=torch.float32).measure(batch())
    assert (restless.calls, restless.cache, restless.history) == (0, None, [1.0])
    assert all(torch.equal(tensor, before[name]) for name, tensor in restless.state_dict().items())
    assert all(parameter.grad is None for parameter in restless.parameters())


def test_references_at_other_values_do_not_meet(restless: Restless) -> None:
    """They share one module; each pass has its own reference's values, in whatever order."""
    reference = Reference(restless)
    values = {name: tensor.double() for name, tensor in restless.state_dict().items()}
    doubled = {name: 2 * tensor for name, tensor in values.items()}
    one, two = reference.at(values), reference.at(doubled)
    alone = [Reference(restless).at(each).measure(batch()).loss_sum for each in (values, doubled)]
    assert [each.measure(batch()).loss_sum for each in (one, two, one, two)] == alone * 2
    for tensor in doubled.values():
        tensor.zero_()
    assert two.measure(batch()).loss_sum == alone[1], "values were copied"


def test_it_is_put_back_after_an_error(restless: Restless) -> None:
    module = ReferenceModule(restless)
    values = {name: tensor.detach().clone() for name, tensor in module.tensors.items()}
    with pytest.raises(IndexError), module.at(values) as inside:
        inside(torch.tensor([[99]]))
    with module.at(values) as inside:
        inside(batch()["input_ids"])
        assert inside.calls == 1
    assert (restless.calls, restless.history, restless.by_name) == (0, [1.0], {"factor": 1.0})
