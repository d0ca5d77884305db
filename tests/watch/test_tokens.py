"""Token weights read off a gradient at logits: against the weights that the loss was made with.

Run: pytest tests/watch/test_tokens.py. Not covered: losses that are no cross entropy beyond being told as such.

Bounds: a weight is off by the unit roundoff of the gradient's format and by (|z|max + 8) u_fp32 where softmax runs in
float32 (``tokens.py`` derives it); float64 all through leaves 1e-12.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dsaccum.watch.token_log_probs import read_log_probs
from dsaccum.watch.tokens import TokenReading, read_tokens

ROWS, LENGTH, VOCABULARY = 3, 8, 50


def batch(*, padded: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(0)
    tokens = torch.randint(1, VOCABULARY, (ROWS, LENGTH))
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    if padded:
        mask[0, -padded:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.where(mask == 1, tokens, -100)}


def read(loss_of, fields: dict[str, Tensor], dtype: torch.dtype = torch.float64, scale: float = 1.0) -> TokenReading:
    torch.manual_seed(1)
    logits = (scale * torch.randn(ROWS, LENGTH, VOCABULARY)).to(dtype).requires_grad_()
    loss_of(logits, fields["labels"]).backward()
    assert logits.grad is not None
    return read_tokens(logits.detach(), logits.grad, fields, ())


def shifted_mean(logits: Tensor, labels: Tensor, **options) -> Tensor:
    flat = logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(flat if flat.dtype == torch.float64 else flat.float(), labels[:, 1:].flatten(), **options)


def test_every_token_of_a_mean_weighs_the_same() -> None:
    reading = read(shifted_mean, batch(padded=3))
    due = ROWS * (LENGTH - 1) - 3
    assert (reading.due, reading.before_shift, reading.positions) == (due, ROWS * LENGTH - 3, ROWS * LENGTH)
    assert reading.weights == pytest.approx([1 / due] * due, rel=1e-12)
    assert reading.shifted
    assert not reading.padding


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float32, 1.0), (torch.bfloat16, 1.0), (torch.float32, 12.0), (torch.float64, 20.0)]
)
def test_weights_are_within_the_derived_tolerance(dtype: torch.dtype, scale: float) -> None:
    """Also where the model is sure of a token, and 1 - p has lost its digits."""
    reading = read(shifted_mean, batch(), dtype, scale)
    due = ROWS * (LENGTH - 1)
    assert reading.reason is None
    assert max(abs(w * due - 1) for w in reading.weights) <= reading.tolerance


def test_one_token_in_a_hundred_percent_more_is_seen() -> None:
    """The control: a weight of its own for one token."""
    weights = torch.ones(VOCABULARY)

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        weights[labels[0, 1]] = 2.0
        return shifted_mean(logits, labels, weight=weights.double(), reduction="sum")

    reading = read(loss_of, batch())
    assert max(reading.weights) == pytest.approx(2.0, rel=1e-12)
    assert min(reading.weights) == pytest.approx(1.0, rel=1e-12)


def test_padding_that_counts_is_told_apart() -> None:
    fields = batch(padded=3)
    fields["labels"] = fields["input_ids"]
    reading = read(shifted_mean, fields)
    assert len(reading.padding) == 3
    assert len(reading.weights) == reading.due == ROWS * (LENGTH - 1) - 3


def test_label_smoothing_and_z_loss_are_told() -> None:
    smoothed = read(lambda logits, labels: shifted_mean(logits, labels, label_smoothing=0.1), batch())
    due = ROWS * (LENGTH - 1)
    assert smoothed.kind == "cross-entropy+label-smoothing"
    assert smoothed.weights == pytest.approx([1 / due] * due, rel=1e-9)

    def with_z_loss(logits: Tensor, labels: Tensor) -> Tensor:
        return shifted_mean(logits, labels) + 0.01 * logits[:, :-1].logsumexp(-1).square().mean()

    reading = read(with_z_loss, batch())
    assert reading.kind == "cross-entropy+z-loss"
    assert reading.weights == pytest.approx([1 / due] * due, rel=1e-9)


def test_what_is_no_cross_entropy_is_not_read() -> None:
    reading = read(lambda logits, _: logits.square().mean(), batch())
    assert reading.reason is not None
    assert "isn't a plain cross entropy" in reading.reason


def test_a_gradient_that_is_the_same_everywhere_is_not_read() -> None:
    """As at outputs that are no logits: without this, it would pass for a smoothed label, and nothing else."""
    reading = read(lambda logits, _: -logits.sum() / 7, batch())
    assert reading.reason is not None


def test_log_probabilities_of_the_targets_say_it_themselves() -> None:
    fields = batch(padded=3)
    due = ROWS * (LENGTH - 1) - 3
    values = -torch.rand(ROWS, LENGTH - 1, generator=torch.Generator().manual_seed(3)) - 0.1
    values = torch.where(fields["labels"][:, 1:] != -100, values, 0.0)
    reading = read_log_probs(values, torch.full_like(values, -1 / due), fields)
    assert (reading.due, reading.before_shift, reading.unweighted, reading.uncalled) == (due, due + ROWS, 0, 0)
    assert reading.weights == pytest.approx([1 / due] * due, rel=2.0**-24)
    assert read_log_probs(values, torch.full_like(values, 0.1), fields).reason is not None
    one_less = torch.full_like(values, -1 / due)
    one_less[1, 2] = 0
    assert read_log_probs(values, one_less, fields).unweighted == 1


def test_rows_of_a_classifier_are_read_as_tokens() -> None:
    torch.manual_seed(2)
    logits = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    F.cross_entropy(logits, labels).backward()
    reading = read_tokens(logits.detach(), logits.grad, {"labels": labels}, ())  # type: ignore[arg-type]
    assert reading.weights == pytest.approx([1 / 6] * 6, rel=1e-12)
    assert reading.due == 6
