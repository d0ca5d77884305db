"""The independent side: what one window's gradient has to be, in plain PyTorch, from raw labels.

Nothing here comes from the engine's side: loss, target counts, slices and the order of samples are made again, so that
no fault can hide on both sides. The gradient that is wanted is that of the mean over all T target tokens of a window:

    L = (1 / T) * sum over micro-steps k and ranks r of S[k, r]      S = sum of a micro-batch's token losses

    big batch       one forward and backward of all E rows, divided by T
    accumulated     sum of the gradients of S[k, r] / T; a micro-batch's own mean thereby weighs n[k, r] / T
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dsaccum.reference_module import ReferenceModule

Batch = Mapping[str, Tensor]
Gradient = dict[str, Tensor]


class SummedLoss(Protocol):
    """A loss that is a sum over a batch, and the count that its mean divides by."""

    def count(self, micro_batch: Batch) -> int:
        """What the sum is to be divided by: for language models, the target tokens."""

    def sum(self, outputs: Any, micro_batch: Batch) -> Tensor:
        """The summed loss, a scalar; ``outputs`` is what the model's forward returned."""


class TokenLoss:
    """Cross entropy of the next token, summed; in float64 when the logits are, in float32 when they are less."""

    def count(self, micro_batch: Batch) -> int:
        """Target tokens: what position t predicts is label t + 1, so a row's first label is no target."""
        return sum(label != -100 for row in micro_batch["labels"].tolist() for label in row[1:])

    def sum(self, outputs: Any, micro_batch: Batch) -> Tensor:
        """Sum over targets of -log softmax(z)[y] = logsumexp(z) - z[y], where z is logits[t] and y is labels[t + 1]."""
        following = micro_batch["labels"][:, 1:]
        counts = following != -100
        logits = outputs.logits[:, :-1][counts]  # [targets, vocabulary]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        chosen = logits.gather(1, following[counts].unsqueeze(1)).squeeze(1)
        return (logits.logsumexp(dim=1) - chosen).sum()


@dataclass(frozen=True)
class Measured:
    """A loss and its gradient by parameter name; a parameter that got no gradient (frozen, unused) has no entry."""

    loss_sum: float
    targets: int
    gradient: Gradient

    @property
    def loss(self) -> float:
        """Mean over target tokens; 0 where there are none."""
        return self.loss_sum / max(self.targets, 1)


class Reference:
    """A private copy of a model at given values, which computes gradients and never changes. Batches are on its device.

    Args:
        model: a plain module, in the values and with the buffers that the forward under test uses: for the truth of a
            bf16 run give the bf16 model, whose rounded weights are then cast up.
        dtype: of parameters and buffers. float64 is the truth, the config's own precision the yardstick.
        autocast: compute type of ``torch.autocast`` around the forward; None for none.
        loss: the user's own loss, if it is not next-token cross entropy.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype = torch.float64,
        autocast: torch.dtype | None = None,
        loss: SummedLoss | None = None,
    ) -> None:
        own = copy.deepcopy(model).to(dtype)
        choose_experts = getattr(own, "set_experts_implementation", None)
        if dtype == torch.float64 and callable(choose_experts):
            choose_experts("eager")  # the grouped matrix product of a mixture of experts has no float64
        self._module = ReferenceModule(own)
        self._values = {name: tensor.detach().clone() for name, tensor in self._module.tensors.items()}
        self._dtype, self._autocast = dtype, autocast
        self._loss: SummedLoss = loss or TokenLoss()

    def at(self, values: Mapping[str, Tensor]) -> Reference:
        """The same reference with parameters (and buffers, where given) at ``values``, named as in a state dict.

        Raises:
            ValueError: a parameter has no value, or one of another shape.
        """
        if missing := sorted(self._module.parameters.keys() - values.keys()):
            raise ValueError(f"{len(missing)} parameters have no value: {', '.join(missing[:3])}")
        other = copy.copy(self)
        other._values = dict(self._values)
        for name in self._values.keys() & values.keys():
            mine, value = self._values[name], values[name].detach()
            if mine.shape != value.shape:
                raise ValueError(f"{name} is {list(mine.shape)}, not {list(value.shape)}")
            other._values[name] = value.to(mine, copy=True)
        return other

    def targets(self, batch: Batch) -> int:
        """What the loss of ``batch`` is divided by."""
        return self._loss.count(batch)

    def measure(self, batch: Batch, *, scale: float = 1.0) -> Measured:
        """One forward and backward of ``scale`` times the summed loss.

        With scale 1 the gradient is a column for weight recovery. In low precision give the scale that the engine
        feeds, so that both sides round alike. ``loss_sum`` is never scaled.
        """
        if self._dtype == torch.float64:
            batch = {name: field.double() if field.is_floating_point() else field for name, field in batch.items()}
        inputs = {name: field for name, field in batch.items() if name != "labels"}
        device = next(iter(batch.values())).device.type
        with self._module.at(self._values) as model:
            with torch.autocast(device, self._autocast) if self._autocast else nullcontext():
                outputs = model(**inputs)
            loss_sum = self._loss.sum(outputs, batch)
            if loss_sum.requires_grad:
                (loss_sum * scale).backward()
            gradient = {name: p.grad for name, p in self._module.parameters.items() if p.grad is not None}
        return Measured(loss_sum.item(), self.targets(batch), gradient)

    def big_batch(self, window: Batch) -> Measured:
        """The whole window in one forward and backward: token-mean loss and its gradient."""
        return self.measure(window, scale=1 / max(self.targets(window), 1))

    def accumulated(self, micro_batches: Sequence[Sequence[Batch]], *, dtype: torch.dtype | None = None) -> Measured:
        """The same from micro-batches [N][W]: each rank adds up its N gradients in ``dtype``, then ranks are added.

        Args:
            micro_batches: micro-batch [k][r] of micro-step k and rank r.
            dtype: of the accumulators; None for that of the gradients.
        """
        window_targets = sum(self.targets(batch) for step in micro_batches for batch in step)
        loss_sum = 0.0
        ranks: list[Gradient] = [{} for _ in micro_batches[0]]
        for step in micro_batches:
            for accumulator, batch in zip(ranks, step, strict=True):
                part = self.measure(batch, scale=1 / max(window_targets, 1))
                loss_sum += part.loss_sum
                _add(accumulator, part.gradient, dtype)
        total: Gradient = {}
        for accumulator in ranks:
            _add(total, accumulator, dtype)
        return Measured(loss_sum, window_targets, total)

    def additivity_errors(self, window: Batch, micro_batches: Sequence[Sequence[Batch]]) -> dict[str, float]:
        """How far the big batch is from the weighted sum of its micro-batches, by parameter; meant for float64.

        About 1e-12 for a loss that is a sum over samples. More means that no accumulation can equal the big batch.
        An error is ||big - sum of w_i g_i|| / S with S = sum of w_i ||g_i||: the gradient itself may be zero by
        mathematics (a key bias in attention). S is taken as 1e-6 of the whole gradient's at the least.
        """
        window_targets = max(sum(self.targets(batch) for step in micro_batches for batch in step), 1)
        total: Gradient = {}
        sizes: dict[str, float] = {}
        for batch in (batch for step in micro_batches for batch in step):
            part = self.measure(batch, scale=1 / window_targets).gradient
            _add(total, part, None)
            for name, piece in part.items():
                sizes[name] = sizes.get(name, 0.0) + _norm(piece)
        big = self.big_batch(window).gradient
        floor = 1e-6 * math.hypot(*sizes.values())
        errors = {}
        for name in sorted(big.keys() | total.keys()):
            difference = big.get(name, torch.zeros(())) - total.get(name, torch.zeros(()))
            errors[name] = _norm(difference) / (max(sizes.get(name, 0.0), floor) or 1.0)
        return errors


def stream_position(
    window: int, micro_step: int, rank: int, row: int, *, accumulation_steps: int, world_size: int, micro_batch: int
) -> int:
    """Which sample of the endless stream is due there, everything counted from 0.

    Window s holds samples s E to (s + 1) E - 1, where E = N W B. Of these, sample (k W + r) B + j goes to micro-step k,
    rank r, row j.
    """
    effective_batch = accumulation_steps * world_size * micro_batch
    return window * effective_batch + (micro_step * world_size + rank) * micro_batch + row


def split_window(window: Batch, *, accumulation_steps: int, world_size: int) -> list[list[dict[str, Tensor]]]:
    """Micro-batch [k][r] of micro-step k and rank r; every field is cut at the same rows.

    Raises:
        ValueError: fields differ in their number of rows, or the rows do not divide.
    """
    rows = {name: len(field) for name, field in window.items()}
    size, rest = divmod(max(rows.values()), accumulation_steps * world_size)
    if rest or len(set(rows.values())) > 1:
        raise ValueError(f"rows {rows} do not divide into {accumulation_steps} micro-steps on {world_size} ranks")

    def micro_batch(step: int, rank: int) -> dict[str, Tensor]:
        first = (step * world_size + rank) * size
        return {name: field[first : first + size] for name, field in window.items()}

    return [[micro_batch(step, rank) for rank in range(world_size)] for step in range(accumulation_steps)]


def due_weights(targets: Sequence[Sequence[int]]) -> list[list[float]]:
    """The weight that each micro-batch's mean gradient is due: its targets over all targets, [N][W]."""
    window_targets = max(sum(sum(step) for step in targets), 1)
    return [[count / window_targets for count in step] for step in targets]


def _add(accumulator: Gradient, gradient: Gradient, dtype: torch.dtype | None) -> None:
    for name, tensor in gradient.items():
        term = tensor.to(dtype or tensor.dtype)
        accumulator[name] = accumulator[name] + term if name in accumulator else term


def _norm(tensor: Tensor) -> float:
    return tensor.double().norm().item()
