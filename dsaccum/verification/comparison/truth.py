"""The reference's side of one window: truth in float64, columns and yardsticks in the config's own precision.

truth       the big batch in float64: one forward and backward
columns     each micro-batch's own mean gradient, computed as the run computes it: same precision, same shape, same
            scale of the loss, at ZeRO 3 DeepSpeed's own linear layer. Rounding then cancels when weights are recovered.
yardsticks  how much error is honest: (a) the columns added up in the config's accumulation type with the weights
            that are due, rounded to the forward's type as ranks may be reduced in; (b) in fp32 the big batch too,
            which rounds everywhere else. (A bf16 big batch adds up thousands of terms in bf16, as in an embedding: that
            is worse than any accumulation, and no yardstick.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsaccum.reference import Batch, Gradient, Reference, SummedLoss, due_weights
from dsaccum.reference_samples import RawSamples, ReferenceSamples
from dsaccum.verification.cases.case import Case, WindowChoice
from dsaccum.verification.comparison.factors import Factors
from dsaccum.verification.comparison.rounding import Noise, Rounding, rounding_noise
from dsaccum.verification.comparison.sketch import GradientSketch
from dsaccum.verification.comparison.weights import recover_robustly, weight_error
from dsaccum.verification.subject.loops import HF_LABELS, OUTSIDE_LOSS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WHOLE_COLUMNS_BYTES = 2 << 30
"""Columns are kept whole up to this size in all, above it as sketches."""

MICRO_BATCHES_ADDED = 4
"""So many are compared with one batch of them all, to see whether the loss is a sum."""


@dataclass(frozen=True)
class WindowTruth:
    """What one window has to give, at the parameters that the run had before it.

    Attributes:
        targets: of each micro-batch, [N][W].
        due: the weight that each micro-batch's mean gradient is due, [N][W].
        loss: token mean in float64.
        big_batch_loss: the same from the big batch in the config's precision.
        gradient: float64, by name; a parameter that gets none has no entry.
        columns: mean gradients, sketched, micro-batch (k, r) at k W + r.
        yardsticks: (a), and (b) where it is one, whole.
        rounding: how far it moves recovered weights.
        sizes: S_t = sum of due_i ||g_i,t||, what errors of tensor t are divided by.
        noise: relative difference of one column computed twice, the largest over tensors.
    """

    targets: list[list[int]]
    due: list[list[float]]
    loss: float
    big_batch_loss: float
    gradient: Gradient
    columns: list[dict[str, Tensor]]
    yardsticks: tuple[Gradient, ...]
    rounding: Noise
    sizes: dict[str, float]
    noise: float

    @property
    def due_in_order(self) -> list[float]:
        """Due weights in the order of the columns."""
        return [weight for step in self.due for weight in step]


class ReferenceSide:
    """Computes truths; owns a private copy of the model and re-makes samples and their order from the raw arrays.

    Args:
        case: what is verified.
        model: the case's model, plain and in float32.
        loss: the user's own loss; None for next-token cross entropy.
    """

    def __init__(self, case: Case, model: nn.Module, loss: SummedLoss | None) -> None:
        self.case = case
        dtype = DTYPES.get(case.precision, torch.float32)
        autocast = DTYPES[case.precision.removeprefix("autocast ")] if "autocast" in case.precision else None
        self._truth = Reference(model, dtype=torch.float64, loss=loss)
        self._yardstick = Reference(model, dtype=dtype, autocast=autocast, loss=loss)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters() if parameter.requires_grad}
        columns = case.batch.accumulation_steps * case.batch.world_size + 3
        self.names = list(shapes)
        self.num_parameters = sum(shape.numel() for shape in shapes.values())
        fits = columns * self.num_parameters * 8 <= WHOLE_COLUMNS_BYTES
        limit = self.num_parameters if fits else 0
        self.sketch = GradientSketch(shapes, whole_limit=limit)
        self._text, self._probe = (self._samples(samples) for samples in (case.samples, case.probe_samples))

    def targets(self, batch: Batch) -> int:
        """What the loss of a micro-batch is divided by."""
        return self._truth.targets(batch)

    def micro_batches(self, choice: WindowChoice) -> list[list[dict[str, Tensor]]]:
        """What each micro-step of each rank is due, [N][W]."""
        return self._of(choice).micro_batch_batches(choice.index)

    def window(self, choice: WindowChoice, values: Mapping[str, Tensor]) -> WindowTruth:
        """The truth of one window.

        Args:
            choice: which window.
            values: parameters and buffers as the forward used them, by name.
        """
        with _linear_layer_of(self.case):
            return self._window(choice, values)

    def _window(self, choice: WindowChoice, values: Mapping[str, Tensor]) -> WindowTruth:
        micro_batches = self.micro_batches(choice)
        big_batch = self._of(choice).window_batch(choice.index)
        truth, yardstick = self._truth.at(values), self._yardstick.at(values)
        targets = [[truth.targets(batch) for batch in step] for step in micro_batches]
        due = due_weights(targets)
        total = max(sum(map(sum, targets)), 1)
        big = truth.big_batch(big_batch)
        big_yardstick = yardstick.big_batch(big_batch)

        columns: list[dict[str, Tensor]] = []
        sizes: dict[str, float] = dict.fromkeys(big.gradient, 0.0)
        accumulated: list[Gradient] = [{} for _ in range(self.case.batch.world_size)]
        for k, step in enumerate(micro_batches):
            for r, batch in enumerate(step):
                scale = self._fed_scale(targets[k][r], total)
                part = yardstick.measure(batch, scale=scale).gradient
                mean = {name: tensor.double() / (scale * max(targets[k][r], 1)) for name, tensor in part.items()}
                columns.append(self.sketch(mean))
                for name, tensor in mean.items():
                    sizes[name] = sizes.get(name, 0.0) + due[k][r] * float(tensor.norm())
                self._accumulate(accumulated[r], part, scale * total)
        reduced = [self._as_communicated(gradient) for gradient in accumulated]
        yardsticks = (_total(reduced), *([big_yardstick.gradient] if self.case.precision == "fp32" else []))
        return WindowTruth(
            targets=targets,
            due=due,
            loss=big.loss,
            big_batch_loss=big_yardstick.loss,
            gradient=big.gradient,
            columns=columns,
            yardsticks=yardsticks,
            rounding=self._rounding_noise(columns, due, yardsticks),
            sizes=sizes,
            noise=self._noise(yardstick, micro_batches[0][0]),
        )

    def additivity(self, choice: WindowChoice, values: Mapping[str, Tensor]) -> dict[str, float]:
        """How far one big batch is from the sum of its micro-batches in float64, by parameter; see ``Reference``.

        A few micro-batches tell: a loss that couples samples does so for any two. They are cut from the big batch, so
        that all have one width.
        """
        big_batch, rows = self._of(choice).window_batch(choice.index), self.case.batch.micro_batch
        number = min(MICRO_BATCHES_ADDED, self.case.batch.total // rows)
        together = {name: field[: number * rows] for name, field in big_batch.items()}
        parts = [{name: field[k * rows : (k + 1) * rows] for name, field in together.items()} for k in range(number)]
        return self._truth.at(values).additivity_errors(together, [parts])

    def draws(self, choice: WindowChoice, values: Mapping[str, Tensor]) -> float:
        """Relative difference of one micro-batch's float64 loss, computed twice: not 0 where the model itself draws."""
        truth = self._truth.at(values)
        batch = max((batch for step in self.micro_batches(choice) for batch in step), key=truth.targets)
        first, second = (truth.measure(batch).loss_sum for _ in range(2))
        return abs(first - second) / abs(first) if first else 0.0

    def big_batch_gradient(self, choice: WindowChoice, values: Mapping[str, Tensor]) -> Gradient:
        """The window's gradient from one big batch in the config's own precision, at any values."""
        return self._yardstick.at(values).big_batch(self._of(choice).window_batch(choice.index)).gradient

    def accumulated_gradient(self, choice: WindowChoice, values: Mapping[str, Tensor]) -> Gradient:
        """The same from micro-batches, added up in the config's accumulation type."""
        dtype = DTYPES[self.case.accumulation_dtype]
        return self._yardstick.at(values).accumulated(self.micro_batches(choice), dtype=dtype).gradient

    def float32_inside(self, choice: WindowChoice, values: Mapping[str, Tensor]) -> bool:
        """Whether the float64 forward computes something in float32, so that the truth is only mixed."""
        batch = {name: field[:1, :16] for name, field in self.micro_batches(choice)[0][0].items()}
        truth = self._truth.at(values)
        with _Float32Spy() as spy, torch.no_grad():
            truth.measure(batch)
        return spy.found

    def _fed_scale(self, targets: int, window_targets: int) -> float:
        """What the loop multiplies a micro-batch's summed loss by, the engine's division by N included.

        Ours feeds S W / T; the plain ones the micro-batch's own mean, S / (n N). For a user's loop it isn't known:
        low precision then rounds otherwise than here, which the tolerance of its weights takes in.
        """
        if self.case.loop in (HF_LABELS, OUTSIDE_LOSS):
            return 1 / (max(targets, 1) * self.case.batch.accumulation_steps)
        return self.case.batch.world_size / window_targets

    def _accumulate(self, accumulator: Gradient, part: Gradient, fed: float) -> None:
        """Add a micro-batch with the weight that is due: its sum over T, of which ``fed`` T was fed already."""
        dtype = DTYPES[self.case.accumulation_dtype]
        for name, tensor in part.items():
            term = (tensor.double() / fed).to(tensor.dtype).to(dtype)
            accumulator[name] = accumulator[name] + term if name in accumulator else term

    def _rounding_noise(
        self, columns: list[dict[str, Tensor]], due: list[list[float]], sides: Sequence[Gradient]
    ) -> Noise:
        """From draws, and from what the yardsticks' own weights are off by."""
        flat = [weight for step in due for weight in step]
        forward = DTYPES[self.case.precision.removeprefix("autocast ")]
        own = torch.float32 if "autocast" in self.case.precision else forward
        formats = Rounding(own, DTYPES[self.case.accumulation_dtype], DTYPES[self.case.communication_dtype])
        drawn = rounding_noise(columns, flat, self.case.batch.world_size, formats)
        found = [recover_robustly(Factors(self.sketch(side), columns)) for side in sides]
        return Noise(
            max([drawn.weights, *(weight_error(each.weights, flat) or 0.0 for each in found)]),
            max([drawn.residual, *(each.residual or 0.0 for each in found)]),
        )

    def _as_communicated(self, gradient: Gradient) -> Gradient:
        dtype = DTYPES[self.case.communication_dtype]
        return {name: tensor.to(dtype).float() for name, tensor in gradient.items()}

    def _noise(self, yardstick: Reference, batch: Batch) -> float:
        first, second = yardstick.measure(batch).gradient, yardstick.measure(batch).gradient
        return max((relative_difference(first[name], second[name]) for name in first), default=0.0)

    def _of(self, choice: WindowChoice) -> ReferenceSamples:
        return self._probe if choice.probe else self._text

    def _samples(self, samples: Any) -> ReferenceSamples:
        raw = RawSamples(
            tokens=samples.tokens,
            starts=samples.starts,
            lengths=samples.lengths,
            prompt_lengths=samples.prompt_lengths,
            padded=samples.padded,
            sequence_length=samples.sequence_length,
        )
        return ReferenceSamples(
            raw,
            seed=self.case.order.seed,
            last_window=self.case.order.last_window,
            accumulation_steps=self.case.batch.accumulation_steps,
            world_size=self.case.batch.world_size,
            micro_batch=self.case.batch.micro_batch,
            pad_token=self.case.vocabulary.pad_token,
            before=self.case.resumed.effective_batches if self.case.resumed is not None else (),
        )


@contextmanager
def _linear_layer_of(case: Case) -> Iterator[None]:
    """ZeRO 3 replaces torch's linear layer by one that rounds the product before it adds the bias.

    Where activations are cut off at 0, as by ReLU, such a last digit may decide over a whole neuron. At other stages
    torch's own is set, since an engine of the caller's may have replaced it in this process.
    """
    before = torch.nn.functional.linear
    replaced = case.zero_stage == 3 and case.config.get("zero_optimization", {}).get("memory_efficient_linear", True)
    torch.nn.functional.linear = _linear_of_zero_3 if replaced else torch._C._nn.linear
    try:
        yield
    finally:
        torch.nn.functional.linear = before


def _linear_of_zero_3(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _LinearOfZero3.apply(input, weight, bias)


class _LinearOfZero3(torch.autograd.Function):
    """x W^T + b as DeepSpeed's: product and sum round one after the other; gradients likewise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., inputs] -> [..., outputs]; where x is a plain matrix, in one operation."""
        device = x.device.type
        ctx.save_for_backward(x, weight)
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        if bias is not None and x.dim() == 2:
            return torch.addmm(bias, x, weight.t())
        product = x.matmul(weight.t())
        if bias is not None:
            product += bias  # in place: under autocast the bias is float32, and the sum isn't
        return product

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Of x, weight and bias, each where it is wanted."""
        x, weight = ctx.saved_tensors
        [gradient] = gradients
        wanted = ctx.needs_input_grad
        rows, others = gradient.reshape(-1, gradient.shape[-1]), tuple(range(gradient.dim() - 1))
        with torch.autocast(*ctx.autocast):
            of_x = gradient.matmul(weight) if wanted[0] else None
            of_weight = rows.t().matmul(x.reshape(-1, x.shape[-1])) if wanted[1] else None
            if len(wanted) == 2:
                return of_x, of_weight
            return of_x, of_weight, (gradient.sum(others) if others else gradient) if wanted[2] else None


def relative_difference(first: Tensor, second: Tensor) -> float:
    """||first - second|| / ||first||; 0 where both are zero."""
    size = float(first.double().norm())
    difference = float((first.double() - second.double()).norm())
    return difference / size if size else (0.0 if difference == 0 else math.inf)


def _total(ranks: list[Gradient]) -> Gradient:
    total: Gradient = {}
    for gradient in ranks:
        for name, tensor in gradient.items():
            total[name] = total[name] + tensor if name in total else tensor
    return total


class _Float32Spy(TorchDispatchMode):
    """Notices a float32 result of an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) and leaf.dtype == torch.float32 for leaf in tree_leaves(result)):
            self.found = True
        return result
