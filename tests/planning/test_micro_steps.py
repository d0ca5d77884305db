"""Micro-steps under fake tensors: a line in B, a whole model from four layers, and what torch really has alive.

Run: pytest tests/planning/test_micro_steps.py -n 0. Not covered: the engine's own bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dsaccum.planning.fakes import FakeRun
from dsaccum.planning.layers import equal_layers, record_whole
from dsaccum.planning.trace import AffineMicroStep, Kind, MicroStep
from tests.planning.subjects import GPT2, LLAMA, fake_run

WAYS = [(GPT2, "fp32", False), pytest.param(LLAMA, "bf16", True, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def gpt2() -> FakeRun:
    return fake_run(GPT2, sequence_length=32, vocabulary=300)


def recorded(run: FakeRun, precision: str, checkpointing: bool, rows: int) -> tuple[MicroStep, MicroStep | None]:
    """The whole model's micro-step, and the same from four layers."""
    model = run.model(checkpointing=checkpointing)
    with run._mode:
        if precision == "bf16":
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.data = tensor.data.to(torch.bfloat16) if tensor.is_floating_point() else tensor.data
        run._record(model, precision, rows)
        layers = equal_layers(model)
        assert layers is not None
        return run._record(model, precision, rows), record_whole(
            model, layers, lambda: run._record(model, precision, rows)
        )


@pytest.mark.slow
@pytest.mark.parametrize(("model", "precision", "checkpointing"), WAYS)
def test_four_layers_make_the_whole_model(model: dict[str, Any], precision: str, checkpointing: bool) -> None:
    whole, unrolled = recorded(fake_run(model), precision, checkpointing, rows=2)
    assert unrolled is not None
    for column in ("kind", "subject", "backward", "alive", "logits", "flops"):
        np.testing.assert_array_equal(getattr(unrolled, column), getattr(whole, column), err_msg=column)


def test_every_event_is_a_line_in_the_micro_batch(gpt2: FakeRun) -> None:
    run = gpt2
    line = run.micro_step("fp32", checkpointing=False)
    five, _ = recorded(run, "fp32", False, rows=5)
    np.testing.assert_array_equal(line.at(5).alive, five.alive)
    assert line.at(5).alive.max() > line.at(2).alive.max()


def test_micro_steps_with_other_events_have_no_line(gpt2: FakeRun) -> None:
    two = gpt2.micro_step("fp32", checkpointing=False).at(2)
    events = {name: getattr(two, name)[:-1] for name in ("kind", "subject", "backward", "alive", "logits", "flops")}
    with pytest.raises(ValueError, match="depend on the size"):
        AffineMicroStep.through(two, MicroStep(**events))


def test_the_loss_holds_logits_twice_and_its_backward_three_times(gpt2: FakeRun) -> None:
    # Forward: the logits and their log-softmax. Backward: the log-softmax, the gradient of it, that of the logits.
    step = gpt2.micro_step("fp32", checkpointing=False).at(3)
    logits = 3 * 32 * 300 * 4
    assert step.logits[~step.backward].max() == 2 * logits
    assert step.logits[step.backward].max() == 3 * logits
    assert gpt2.vocabulary == 300


def test_each_trained_parameter_gets_one_gradient(gpt2: FakeRun) -> None:
    step = gpt2.micro_step("fp32", checkpointing=False).at(2)
    count = len(list(gpt2.model(checkpointing=False).parameters()))
    assert sorted(step.subject[step.kind == Kind.GRADIENT].tolist()) == list(range(count))


def test_checkpointing_keeps_less_and_computes_more(gpt2: FakeRun) -> None:
    plain, checkpointed = (gpt2.micro_step("fp32", checkpointing=each).at(8) for each in (False, True))
    assert checkpointed.alive.max() < plain.alive.max()
    # All but embedding and head once more: at most a third of forward and backward together.
    assert 1.1 < checkpointed.flops.sum() / plain.flops.sum() < 4 / 3
