"""Recording changes nothing, and a copy gives the gradient again, whatever the engine hangs on the outputs.

Run: pytest tests/watch/test_recording.py. Not covered: CUDA.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsaccum.watch.module_copy import CannotCopy, Skeleton
from dsaccum.watch.recompute import NotRepeatable, recompute
from dsaccum.watch.recording import Recorder


class Model(nn.Module):
    """Gives a loss and the logits that lead to it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 4)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.seen += 1
        logits = self.head(self.drop(self.body(x).tanh())) * (1 + 0.1 * self.seen)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def divide_at_outputs(output: dict[str, Tensor]) -> None:
    """As some versions of DeepSpeed do: logits that lead to the loss divide a second time."""
    for tensor in output.values():
        tensor.register_hook(lambda gradient: gradient / 4)


def run(model: nn.Module, recorder: Recorder | None, *, steps: int = 3) -> dict[str, Tensor]:
    torch.manual_seed(1)
    for _ in range(steps):
        x, labels = torch.randn(5, 6), torch.randint(0, 4, (5,))
        output = model(x, labels=labels)
        divide_at_outputs(output)
        if recorder is not None:
            recorder.passed_on(output)
        loss = output["loss"]
        loss /= 2  # in place, as Trainer does
        loss.backward()
        x.zero_()  # a loop may change its batch
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def unexpected(error: Exception) -> None:
    raise AssertionError from error


def test_gradients_are_bit_identical_and_computed_again() -> None:
    """The sum of the recomputed micro-batches is what was accumulated: in this precision to the order of additions."""
    plain = run(Model(), None)
    model = Model()
    skeleton = Skeleton(model)
    recorder = Recorder(model, unexpected)
    seen = run(model, recorder)
    recorder.stop()
    assert all(torch.equal(plain[name], seen[name]) for name in plain)
    values = {name: p.detach() for name, p in model.named_parameters()}
    before = torch.get_rng_state()
    again = recompute(skeleton, model, values, list(values), recorder.micro_steps, dict)
    assert torch.equal(before, torch.get_rng_state())
    assert len(again.columns) == 3
    for name in plain:
        total = sum(column[name] for column in again.columns)
        torch.testing.assert_close(total, plain[name], rtol=8 * 2**-24, atol=8 * 2**-24)
    assert all(torch.equal(plain[name], seen[name]) for name in plain)
    assert all(forward.engine_factor() == 1 / 16 for forward in recorder.forwards)


def test_replacing_the_outputs_would_change_the_run() -> None:
    """The control: with copies in their place the division at the logits is lost, and the gradient 4 times as large."""
    plain = run(Model(), None)
    model = Model()
    model.register_forward_hook(lambda *given: {name: tensor.clone() for name, tensor in given[-1].items()})
    replaced = run(model, None)
    for name in plain:
        torch.testing.assert_close(replaced[name], 4 * plain[name], rtol=1e-6, atol=0)


def test_forwards_without_a_gradient_are_no_micro_steps() -> None:
    model = Model()
    recorder = Recorder(model, unexpected)
    model(torch.randn(2, 6), labels=torch.tensor([0, 1]))
    with torch.no_grad():
        model(torch.randn(2, 6), labels=torch.tensor([0, 1]))
    run(model, recorder, steps=2)
    assert len(recorder.micro_steps) == 2


def test_two_forwards_in_one_backward_are_one_micro_step() -> None:
    model = Model()
    recorder = Recorder(model, unexpected)
    losses = [model(torch.randn(2, 6), labels=torch.tensor([0, 1]))["loss"] for _ in range(2)]
    sum(losses).backward()
    assert [len(step) for step in recorder.micro_steps] == [2]


def test_what_fails_in_recording_is_told_and_hurts_nobody() -> None:
    class Odd:
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("no copies")

    model = Model()
    model.odd = Odd()
    with pytest.raises(CannotCopy, match="no copies"):
        Skeleton(model)


def test_a_copy_that_leads_back_to_the_original_is_found_out() -> None:
    """A function kept in an attribute is not copied, and knows the original."""
    model = Model()
    original = model.forward
    model.forward = lambda *given, **named: original(*given, **named)  # type: ignore[method-assign]
    skeleton, recorder = Skeleton(model), Recorder(model, unexpected)
    run(model, recorder, steps=1)
    recorder.stop()
    values = {name: p.detach() for name, p in model.named_parameters()}
    with pytest.raises(NotRepeatable, match="still calls the original"):
        recompute(skeleton, model, values, list(values), recorder.micro_steps, dict)
