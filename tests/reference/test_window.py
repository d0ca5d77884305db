"""One window's gradient: big batch, micro-batches, accumulation. Run: pytest tests/reference/test_window.py

Not covered here: agreement with DeepSpeed, which is the verifier's business.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsaccum.reference import Reference, TokenLoss, due_weights, split_window, stream_position
from tests.reference.models import LENGTH, VOCABULARY, OneWeight, PlainSum, gpt, llama, token_window

EPS64, EPS32, EPS_BF16 = 2.0**-52, 2.0**-23, 2.0**-7


def relative(ours: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Relative L2 distance of two gradients as wholes."""
    assert ours.keys() == truth.keys()
    difference = sum((ours[name].double() - truth[name]).square().sum().item() for name in truth)
    return (difference / sum(truth[name].square().sum().item() for name in truth)) ** 0.5


def test_the_reference_loads_no_deepspeed_and_nothing_else_of_dsaccum() -> None:
    ours = {"dsaccum", *(f"dsaccum.reference{end}" for end in ("", "_module", "_optimizers", "_schedules"))}
    code = f"import sys, {', '.join(sorted(ours))}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {name for name in loaded if name.split(".")[0] in ("deepspeed", "dsaccum")} == ours


def test_hand_worked_window_is_exact() -> None:
    """One weight, integer data, T = 4: everything is a small multiple of 1/4, so all comparisons are bitwise.

    micro-batch 1: one target, x = 4          sum of gradients 4     mean 4    weight 1/4
    micro-batch 2: three targets, x = 1, 2, 3 sum of gradients 6     mean 2    weight 3/4
    big batch: 10 / 4 = 2.5; mean of the means: (4 + 2) / 2 = 3; loss = 3 x 10 / 4 = 7.5
    """
    x = torch.tensor([[4.0, 9.0, 9.0], [1.0, 2.0, 3.0]])
    window = {"x": x, "labels": torch.tensor([[1, -100, -100], [1, 1, 1]])}
    parts = split_window(window, accumulation_steps=2, world_size=1)
    for dtype in (torch.float64, torch.float32):
        reference = Reference(OneWeight(), dtype=dtype, loss=PlainSum())
        big, small = reference.big_batch(window), reference.accumulated(parts)
        assert big.gradient["w"].item() == small.gradient["w"].item() == 2.5
        assert big.loss == small.loss == 7.5
        assert big.targets == small.targets == 4
        columns = [reference.measure(step[0]) for step in parts]
        assert [(column.targets, column.gradient["w"].item()) for column in columns] == [(1, 4.0), (3, 6.0)]
        assert due_weights([[1], [3]]) == [[0.25], [0.75]]
        # Negative control: micro-batches weighed as equals give another number.
        assert sum(column.gradient["w"].item() / column.targets / 2 for column in columns) == 3.0


def test_targets_are_counted_after_the_shift() -> None:
    """[7, 8, -100, 9]: label 7 is predicted by nothing, so 8 and 9 count; before the shift it would be 3."""
    assert TokenLoss().count({"labels": torch.tensor([[7, 8, -100, 9], [5, -100, -100, -100]])}) == 2
    assert int((torch.tensor([[7, 8, -100, 9], [5, -100, -100, -100]]) != -100).sum()) == 4


def test_the_loss_is_cross_entropy_in_true_float64() -> None:
    """Against F.cross_entropy in float64: 63 terms of size about 4 each round by an eps, so 63 x 4 x EPS64 bounds it.

    Negative control: the same loss cast down to float32, as transformers' own does, is outside by six orders.
    """
    torch.manual_seed(0)
    logits = 3 * torch.randn(7, LENGTH, VOCABULARY, dtype=torch.float64)
    labels = torch.randint(VOCABULARY, (7, LENGTH))
    outputs, batch = type("Outputs", (), {"logits": logits}), {"labels": labels}
    truth = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    bound = 63 * 4 * EPS64 * 4
    loss = TokenLoss().sum(outputs, batch)
    assert loss.dtype == torch.float64
    assert abs(loss - truth) < bound
    outputs.logits = logits.float()
    assert abs(TokenLoss().sum(outputs, batch) - truth) > 100 * bound
    outputs.logits = logits.bfloat16()
    assert TokenLoss().sum(outputs, batch).dtype == torch.float32


def test_loss_and_gradient_agree_with_transformers_and_autograd() -> None:
    """A packed window through the model's own loss, which rounds each token to float32: relative error < 10 EPS32."""
    model, window = gpt(), token_window(4, ragged=False)
    ours = Reference(model).big_batch(window)
    loss = model.double()(**window).loss
    loss.backward()
    assert ours.loss == pytest.approx(loss.item(), rel=10 * EPS32)
    assert relative(ours.gradient, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}) < 10 * EPS32
    assert ours.targets == 4 * (LENGTH - 1)


@pytest.mark.parametrize("ragged", [False, True], ids=["packed", "ragged"])
@pytest.mark.parametrize(("steps", "ranks"), [(2, 1), (3, 2), (6, 2)])
def test_big_batch_is_the_weighted_sum_of_its_micro_batches(ragged: bool, steps: int, ranks: int) -> None:
    """In float64 to 1e-12 of S: a gradient is a sum of some 1e3 products, each rounded by 2.2e-16 (seen: 1.5e-16).

    Negative controls: the mean of means is off by more than 1e-2 where counts differ, a weight wrong by 1 % by 1e-4.
    """
    reference, window = Reference(gpt()), token_window(12, ragged=ragged)
    parts = split_window(window, accumulation_steps=steps, world_size=ranks)
    errors = reference.additivity_errors(window, parts)
    assert len(errors) == len(dict(gpt().named_parameters()))
    assert max(errors.values()) < 1e-12

    big, small = reference.big_batch(window), reference.accumulated(parts)
    assert relative(small.gradient, big.gradient) < 1e-12
    assert small.loss == pytest.approx(big.loss, rel=1e-13)

    columns = [reference.measure(batch) for step in parts for batch in step]
    due = [weight for step in due_weights([[reference.targets(b) for b in step] for step in parts]) for weight in step]

    def weighed(weights: list[float]) -> dict[str, Tensor]:
        return {
            name: sum(w * c.gradient[name] / max(c.targets, 1) for w, c in zip(weights, columns, strict=True))
            for name in big.gradient
        }

    assert relative(weighed(due), big.gradient) < 1e-12
    equal = [1 / len(columns)] * len(columns)
    assert (relative(weighed(equal), big.gradient) > 1e-2) == ragged
    assert relative(weighed([*due[:-1], 1.01 * due[-1]]), big.gradient) > 1e-4


def test_micro_batch_without_targets_adds_nothing() -> None:
    """Rows 0 and 1 of a ragged window hold no target: their gradient is exactly zero, not NaN and not absent."""
    reference, window = Reference(gpt()), token_window(4, ragged=True)
    empty = reference.measure({name: field[:2] for name, field in window.items()})
    assert (empty.targets, empty.loss_sum, empty.loss) == (0, 0.0, 0.0)
    assert all(not tensor.any() for tensor in empty.gradient.values())
    rest = reference.big_batch({name: field[2:] for name, field in window.items()})
    assert relative(reference.big_batch(window).gradient, rest.gradient) < 1e-12


def test_a_loss_that_is_no_sum_over_samples_is_told_apart() -> None:
    """Batch normalisation: a micro-batch is normalised by itself. Errors are of order 1, against 1e-12 for a sum."""

    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.layer(x)).square() * x

    torch.manual_seed(0)
    window = {"x": torch.randn(8, 3), "labels": torch.ones(8, 3, dtype=torch.long)}
    parts = split_window(window, accumulation_steps=2, world_size=1)
    assert max(Reference(Normalised(), loss=PlainSum()).additivity_errors(window, parts).values()) > 1e-3


def test_what_a_forward_leaves_behind_does_not_reach_the_next() -> None:
    """A buffer that grows with every forward scales the output; two measurements are bitwise equal all the same."""

    class Counting(OneWeight):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            result = super().forward(x) * self.seen
            self.seen = self.seen + 1
            return result

    model, batch = Counting(), {"x": torch.ones(1, 1), "labels": torch.ones(1, 1, dtype=torch.long)}
    reference = Reference(model, loss=PlainSum())
    assert [reference.measure(batch).gradient["w"].item() for _ in range(3)] == [1.0, 1.0, 1.0]
    assert model.seen == 1
    assert reference.at({"w": torch.tensor(2.0), "seen": torch.tensor(5.0)}).measure(batch).gradient["w"] == 5.0
    # Negative control: the model itself does remember.
    assert [model(batch["x"]).item() for _ in range(2)] == [3.0, 6.0]


def test_values_are_taken_over_and_the_original_stays() -> None:
    window, values = token_window(2, ragged=False), {n: 0.5 * t for n, t in gpt().state_dict().items()}
    model = gpt()
    reference = Reference(model)
    before = reference.big_batch(window).loss
    moved = reference.at(values).big_batch(window).loss
    model.load_state_dict(values)
    assert moved == Reference(model).big_batch(window).loss != before == reference.big_batch(window).loss
    with pytest.raises(ValueError, match="1 parameters have no value: transformer"):
        reference.at({n: t for n, t in values.items() if n not in ("transformer.wte.weight", "lm_head.weight")})
    with pytest.raises(ValueError, match="is \\[23, 16\\], not \\[1, 16\\]"):
        reference.at({**values, "transformer.wte.weight": torch.zeros(1, 16)})


def test_tied_frozen_and_unused_parameters() -> None:
    """Tied weights are named once; a frozen or unused parameter has no entry, which is not the same as zero."""
    model = gpt()
    model.transformer.h[0].mlp.c_fc.bias.requires_grad_(False)
    model.unused = nn.Parameter(torch.ones(3))
    window = token_window(4, ragged=False)
    reference = Reference(model)
    gradient = reference.big_batch(window).gradient
    assert "transformer.wte.weight" in gradient
    assert not {"lm_head.weight", "transformer.h.0.mlp.c_fc.bias", "unused"} & gradient.keys()
    untied = Reference(gpt(tie_word_embeddings=False)).big_batch(window).gradient
    assert "lm_head.weight" in untied
    parts = split_window(window, accumulation_steps=2, world_size=1)
    assert reference.accumulated(parts).gradient.keys() == gradient.keys()
    assert max(reference.additivity_errors(window, parts).values()) < 1e-12


def test_activation_checkpointing_recomputes_with_the_given_values() -> None:
    """Recomputed activations are the same operations on the same numbers: bitwise equal."""
    window, values = token_window(2, ragged=False), {n: 0.5 * t for n, t in gpt().state_dict().items()}
    checkpointed = gpt()
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ours, plain = (Reference(model).at(values).big_batch(window) for model in (checkpointed, gpt()))
    assert all(torch.equal(ours.gradient[name], plain.gradient[name]) for name in plain.gradient)


def yardsticks() -> list[Any]:
    return [
        pytest.param({"dtype": torch.float32}, None, 10 * EPS32, id="fp32"),
        pytest.param({"dtype": torch.bfloat16}, torch.float32, 2 * EPS_BF16, id="bf16"),
        pytest.param({"dtype": torch.bfloat16}, torch.bfloat16, 2 * EPS_BF16, id="bf16-in-bf16"),
        pytest.param({"dtype": torch.float32, "autocast": torch.bfloat16}, None, 2 * EPS_BF16, id="autocast"),
    ]


@pytest.mark.parametrize(("precision", "accumulate_in", "bound"), yardsticks())
@pytest.mark.parametrize("build", [gpt, llama])
def test_yardsticks_are_as_far_from_truth_as_their_precision(
    build: Any, precision: dict[str, Any], accumulate_in: torch.dtype | None, bound: float
) -> None:
    """Some ten roundings on the way, each by at most half an epsilon and of random sign: below two epsilons in bf16.

    fp32 has a wider factor, since the products' sums are rounded too. Seen: 1 epsilon in fp32, 0.4 to 0.7 in bf16.
    Negative control: the mean of the means is outside in every precision.
    """
    model, window = build().to(precision["dtype"]), token_window(8, ragged=True)
    parts = split_window(window, accumulation_steps=4, world_size=2)
    truth = Reference(model).big_batch(window).gradient  # the bf16 values cast up
    yardstick = Reference(model, **precision).accumulated(parts, dtype=accumulate_in).gradient
    wanted = accumulate_in or precision["dtype"]
    assert {tensor.dtype for tensor in yardstick.values()} == {wanted}
    error = relative(yardstick, truth)
    assert bound / 100 < error < bound  # the lower end: it really is computed in that precision
    columns = [Reference(model, **precision).measure(batch) for step in parts for batch in step]
    means = {name: sum(c.gradient[name].double() / max(c.targets, 1) / 8 for c in columns) for name in truth}
    assert relative(means, truth) > bound


def test_bf16_accumulation_loses_more_than_fp32() -> None:
    """32 gradients of one row each: adding up in bf16 costs visibly more (fact 10; seen: 8.7e-3 against 4.9e-3)."""
    model, window = gpt().bfloat16(), token_window(32, ragged=False)
    parts = split_window(window, accumulation_steps=32, world_size=1)
    truth, yardstick = Reference(model).big_batch(window).gradient, Reference(model, dtype=torch.bfloat16)
    high, low = (
        relative(yardstick.accumulated(parts, dtype=t).gradient, truth) for t in (torch.float32, torch.bfloat16)
    )
    assert low > 1.2 * high


def test_every_sample_is_due_at_one_place() -> None:
    """N = 2, W = 2, B = 2, E = 8, worked out: micro-step 1 on rank 0 holds samples 4 and 5 of the window."""
    shape = {"accumulation_steps": 2, "world_size": 2, "micro_batch": 2}
    places = [(k, r, j) for k in range(2) for r in range(2) for j in range(2)]
    assert [stream_position(0, *place, **shape) for place in places] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [stream_position(3, 1, 0, row, **shape) for row in range(2)] == [28, 29]
    window = {"ids": torch.arange(24, 32)}
    parts = split_window(window, accumulation_steps=2, world_size=2)
    assert [[batch["ids"].tolist() for batch in step] for step in parts] == [[[24, 25], [26, 27]], [[28, 29], [30, 31]]]
    for k, r, j in places:
        assert parts[k][r]["ids"][j] == stream_position(3, k, r, j, **shape)


@pytest.mark.parametrize("window", [{"a": torch.zeros(7)}, {"a": torch.zeros(8), "b": torch.zeros(4)}])
def test_rows_that_do_not_fit_are_refused(window: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match="do not divide into 2 micro-steps on 2 ranks"):
        split_window(window, accumulation_steps=2, world_size=2)


def test_mixture_of_experts_runs_in_float64() -> None:
    """Its experts are a grouped product, which has no float64 (fact 38): the truth computes them one by one."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, num_local_experts=4, max_position_embeddings=LENGTH, use_cache=False,
        )
    )  # fmt: skip
    window = token_window(4, ragged=False)
    parts = split_window(window, accumulation_steps=2, world_size=1)
    # Its router and rotary embedding compute in float32 inside, hence float32's bound (seen: 1.6e-16, since both sides
    # round each token alike).
    assert max(Reference(model).additivity_errors(window, parts).values()) < 100 * EPS32
