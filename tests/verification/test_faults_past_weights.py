"""Faults past the weights: clipping, schedule, Adam's count, noise, kept graphs, NaN, a loss that is no sum; one rank.

Run: pytest -n 0 tests/verification/test_faults_past_weights.py. BOUND as in test_faults.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dsaccum.engine.process import Ranks
from dsaccum.instruments.memory import measure_memory
from dsaccum.loss import build_loss
from dsaccum.verification.cases.case import Case
from dsaccum.verification.cases.windows import case_stream
from dsaccum.verification.subject.faults import FAULTS
from dsaccum.verification.subject.faults.optimizer import RATIO
from dsaccum.verification.subject.loops import Subject
from tests.cases import PEAK_RATE, tiny_gpt
from tests.verification.planting import Run, difference, due_weights, make_case, mean_gradients, norm, run

BOUND, STEPS = 3e-6, 3
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


@pytest.fixture(scope="module")
def clean(one_rank: Ranks) -> Run:
    """Three windows without a fault."""
    return run(one_rank, make_case(steps=STEPS, windows=3))


@STAGES
@pytest.mark.parametrize("clipping", [0.2, 0.0])
def test_another_limit_clips(one_rank: Ranks, clean: Run, stage: int, clipping: float) -> None:
    """Half the limit, or where there is none, half the norm: norm x min(1, limit / (norm + 1e-6))."""
    found = run(one_rank, make_case("clipping-mismatch", steps=STEPS, stage=stage, clipping=clipping))
    assert difference(found.gradient(), clean.gradient()) < BOUND
    before = norm(clean.gradient())
    limit = 0.5 * (clipping or before)
    assert norm(found.saw()) == pytest.approx(before * limit / (before + 1e-6), rel=1e-5)
    assert found.left == []


@pytest.mark.parametrize("stage", [0, 1])
def test_the_sum_is_clipped_after_each_micro_step(one_rank: Ranks, stage: int) -> None:
    limit = 0.2
    case = make_case("clipped-every-micro-step", steps=STEPS, stage=stage, clipping=limit)
    total: dict[str, torch.Tensor] = {}
    for step, (weight, gradient) in enumerate(zip(due_weights(case)[0], mean_gradients(case)[0], strict=True)):
        total = {name: total.get(name, 0) + weight * tensor for name, tensor in gradient.items()}
        if step < STEPS - 1:
            assert norm(total) > limit
            total = {name: tensor * limit / (norm(total) + 1e-6) for name, tensor in total.items()}
    assert difference(run(one_rank, case).gradient(), total) < BOUND


@STAGES
def test_the_schedule_runs_ahead(one_rank: Ranks, stage: int) -> None:
    """Warm-up over 5 steps, linear: DeepSpeed uses its minimum for the first two updates."""
    slope = (PEAK_RATE - 1e-4) / 5
    due = [1e-4 + slope * max(0, update - 1) for update in range(6)]
    three = {"steps": 2, "windows": 3, "stage": stage}
    assert run(one_rank, make_case(**three)).rates == pytest.approx(due[:3])
    # N = 2, update n (from 1): 2 n - 1 micro-steps have advanced the schedule, where n - 1 windows should have.
    per_micro_step = run(one_rank, make_case("schedule-per-micro-step", **three)).rates
    assert per_micro_step == pytest.approx([due[1], due[3], due[5]])
    assert run(one_rank, make_case("schedule-offset", **three)).rates == pytest.approx(due[1:4])
    assert run(one_rank, make_case("rate-mismatch", **three)).rates == pytest.approx([RATIO * rate for rate in due[:3]])


@STAGES
def test_adam_counts_one_step_too_many(one_rank: Ranks, stage: int) -> None:
    """First update: m / (1 - b1^t) over sqrt(v / (1 - b2^t)), m = (1 - b1) g, v = (1 - b2) g^2; t is 2, not 1.

    Ratio: (0.1 / 0.19) / sqrt(0.05 / 0.0975) = 0.73497.
    """
    case = make_case("optimizer-count-offset", steps=STEPS, stage=stage)
    step = run(one_rank, case).windows[0].steps[0]
    assert step.before is not None
    assert step.after is not None
    assert all(float(state["step"]) == 2 for state in step.after.states.values())
    name = "transformer.h.1.mlp.c_fc.weight"
    rate, decay = 1e-4, 0.1
    moved = step.after.masters[name].double() - step.before.masters[name].double() * (1 - rate * decay)
    gradient = step.gradients[name]
    assert gradient is not None
    ratio = moved / (-rate * gradient.double().sign())
    large = gradient.abs() > 1e-4  # where Adam's eps of 1e-8 and the parameter's own rounding don't show
    assert ratio[large].median().item() == pytest.approx(0.73497, rel=1e-3)


@STAGES
def test_noise_is_drawn_in_every_forward(one_rank: Ranks, clean: Run, stage: int) -> None:
    found = run(one_rank, make_case("randomness-active", steps=STEPS, stage=stage))
    assert 1e-3 < difference(found.gradient(), clean.gradient()) < 0.5
    assert found.left == []


def test_kept_graphs_grow_with_n_and_change_no_number(one_rank: Ranks, clean: Run) -> None:
    found = run(one_rank, make_case("activations-kept", steps=STEPS))
    assert difference(found.gradient(), clean.gradient()) == 0.0

    def activations(subject: Subject, loop: Any) -> int:
        loop()
        return measure_memory(subject.engine, [loop]).highest["activation"]

    peaks = {
        (identifier, steps): run(
            one_rank, make_case(identifier, steps=steps, windows=1, padded=False), activations
        ).seen
        for identifier in (None, "activations-kept")
        for steps in (2, 6)
    }
    assert peaks[None, 6] == pytest.approx(peaks[None, 2], rel=0.01)
    assert peaks["activations-kept", 6] > 2 * peaks["activations-kept", 2]


def test_the_loss_is_no_sum_over_samples() -> None:
    """In float64: the gradient over all rows against the sum over micro-batches; cross entropy is additive to 1e-12."""
    case, plain = make_case("loss-not-additive", padded=False), make_case(padded=False)
    assert plain.experiment.loss.factory is None
    assert _additivity_error(plain) < 1e-12
    assert _additivity_error(case) > 1e-2
    assert FAULTS["loss-not-additive"].alter(plain) is plain


def test_nan_comes_once(one_rank: Ranks) -> None:
    found = run(one_rank, make_case("non-finite-gradient", steps=STEPS))
    assert found.windows[0].finite == [True, False, True]
    assert [window.steps[0].applied for window in found.windows] == [False, True]
    # Without dsaccum's loop nobody looks at ZeRO 0: every parameter is lost.
    plain = run(one_rank, make_case("non-finite-gradient", steps=STEPS, loop="outside-loss"))
    assert all(gradient.isnan().any() for gradient in plain.gradient(1).values())


def _additivity_error(case: Case) -> float:
    model, loss = tiny_gpt().double(), build_loss(case.experiment.loss.factory, source=case.source)
    parameters = list(model.parameters())

    def gradient(micro_batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        outputs = model(input_ids=micro_batch["input_ids"])
        if case.experiment.loss.factory is None:  # the product's own rounds to float32
            logits = outputs.logits[:, :-1].flatten(0, 1)
            total = F.cross_entropy(logits, micro_batch["labels"][:, 1:].flatten(), reduction="sum")
        else:
            total = loss.sum(outputs, micro_batch)
        return list(torch.autograd.grad(total, parameters))

    window = case_stream(case, 0).window(0)
    whole = gradient({name: torch.cat([batch[name] for batch in window]) for name in window[0]})
    parts = [sum(each) for each in zip(*map(gradient, window), strict=True)]
    named = [{str(index): tensor for index, tensor in enumerate(tensors)} for tensors in (parts, whole)]
    return difference(*named)
