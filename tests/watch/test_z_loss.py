"""A z-loss beside the cross entropy: one coefficient in all of a window passes, another in each micro-batch does not.

Run: pytest tests/watch/test_z_loss.py. Not covered: one that is N times too strong everywhere; a note says what it is.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dsaccum.watch.tokens import TokenReading, read_tokens
from dsaccum.watch.z_loss import ZReading, is_mean_of_means, unequal, z_fault, z_note
from tests.watch.running import only_window, watched

ROWS, LENGTH, VOCABULARY = 3, 12, 50


def read(coefficient: float, dtype: torch.dtype, *, smoothing: float = 0.0, scale: float = 1.0) -> TokenReading:
    """Cross entropy on the second half of each row, z-loss on all of it; sums, so that s is 1."""
    torch.manual_seed(0)
    labels = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    labels[:, : LENGTH // 2] = -100
    logits = (scale * torch.randn(ROWS, LENGTH, VOCABULARY)).to(dtype).requires_grad_()
    exact = logits if dtype == torch.float64 else logits.float()
    loss = F.cross_entropy(exact.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=smoothing)
    (loss + coefficient * exact.logsumexp(-1).square().sum()).backward()
    assert logits.grad is not None
    return read_tokens(logits.detach(), logits.grad, {"labels": labels}, ())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("dtype", "scale"), [(torch.float64, 1.0), (torch.float32, 0.1), (torch.float32, 6.0)])
@pytest.mark.parametrize("coefficient", [1e-2, 1e-4])
def test_the_coefficient_is_read_also_where_prompts_have_a_z_loss(
    dtype: torch.dtype, scale: float, coefficient: float, smoothing: float
) -> None:
    reading = read(coefficient, dtype, smoothing=smoothing, scale=scale)
    assert reading.reason is None
    assert len(reading.weights) == reading.due == ROWS * LENGTH // 2
    assert abs(reading.z.coefficient - coefficient) <= reading.z.error + 1e-9 * coefficient
    assert reading.z.proportional
    assert reading.z.there or dtype != torch.float64


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_no_z_loss_is_found_where_there_is_none(dtype: torch.dtype, smoothing: float) -> None:
    readings = [read(0.0, dtype, smoothing=smoothing, scale=scale).z for scale in (0.3, 1.0, 4.0)]
    assert not any(each.there for each in readings)
    assert z_fault(readings) is None
    assert z_note(readings) == []


def test_one_coefficient_passes_and_others_do_not() -> None:
    even = [read(1e-2, torch.float32, scale=scale).z for scale in (0.5, 1.0, 2.0)]
    assert not unequal(even)
    assert "0.01 (log sum exp)^2" in z_note(even)[0]
    fault = z_fault([*even, read(1.1e-2, torch.float32).z])
    assert fault is not None
    assert fault[0] == "fail"
    assert z_fault([*even, read(0.0, torch.float32).z]) is not None


def test_means_of_micro_batches_are_told_from_other_inequalities() -> None:
    readings = [ZReading(0.01 * 60 / n, 1e-7) for n in (10, 20, 30)]
    assert is_mean_of_means(readings, [10, 20, 30], [1.0] * 3)
    assert not is_mean_of_means(readings, [10, 20, 31], [1.0] * 3)


def test_a_pull_that_is_no_z_loss_is_not_passed() -> None:
    """Along p as a z-loss is, but by another amount in each token."""
    torch.manual_seed(0)
    logits = torch.randn(6, VOCABULARY, dtype=torch.float64, requires_grad=True)
    own = torch.tensor([1.0, 3.0, 1.0, 2.0, 1.0, 5.0])
    (F.cross_entropy(logits, torch.arange(6), reduction="sum") + (own * logits.logsumexp(-1)).sum()).backward()
    assert logits.grad is not None
    z = read_tokens(logits.detach(), logits.grad, {"labels": torch.arange(6)}, ()).z
    fault = z_fault([z])
    assert fault is not None
    assert fault[0] == "untested"


@pytest.mark.parametrize("mistake", ["", "z-loss-mean"])
def test_a_script_with_z_loss(one_rank: object, mistake: str) -> None:
    words = ["--ragged", "--loss", "tokens", "--z-loss", "0.01", "--mistake", mistake]
    window = only_window(watched("plain_loop", *words))
    assert window.verdict == ("not_equivalent" if mistake else "equivalent"), window.reasons
    assert [(each.id, each.confidence) for each in window.causes] == ([("mean-of-means", "certain")] if mistake else [])
    assert any("0.01 (log sum exp)^2" in note for note in window.notes) != bool(mistake)
    assert "z-loss" in (window.reasons["weighting"] if mistake else window.notes[0])
