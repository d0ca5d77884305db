"""Cases small enough to run each fault on, and what a run leaves: gradients, snapshots, fed data, what stayed planted.

The expected gradient is made from each micro-batch's own mean gradient in plain float64 PyTorch and the weights that a
fault is meant to give them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsaccum.batch import EffectiveBatch
from dsaccum.config.experiment import Experiment
from dsaccum.engine.process import Ranks
from dsaccum.engine.window_engine import WindowEngine
from dsaccum.instruments.replicas import parameter_checksums
from dsaccum.loss import build_loss
from dsaccum.verification.cases.case import Case, OrderRule, Vocabulary, WindowChoice
from dsaccum.verification.cases.windows import case_stream
from dsaccum.verification.subject.capture import WindowCapture, captured
from dsaccum.verification.subject.faults import fault_of
from dsaccum.verification.subject.loops import Subject, loop_of
from tests import cases
from tests.cases import LENGTH, VOCABULARY, StillDog, random_samples, tiny_gpt

SAMPLES = 100
BF16 = {"bf16": {"enabled": True}}


def make_case(
    fault: str | None = None,
    *,
    ranks: int = 1,
    steps: int = 4,
    rows: int = 2,
    stage: int = 0,
    windows: int = 2,
    padded: bool = True,
    bf16: bool = False,
    loop: str = "dsaccum",
    clipping: float = 0.0,
    last_window: Literal["continue", "short"] = "continue",
) -> Case:
    """Two windows of the tiny GPT, with warm-up from a rate that is not 0; ``short``: the second one is."""
    plain = cases.Case(ranks, steps, rows, stage, clipping=clipping, precision=BF16 if bf16 else {})
    precision = "bf16" if bf16 else "fp32"
    samples = random_samples(SAMPLES, padded=padded)
    experiment = Experiment.model_validate(
        {
            "name": "faults",
            "model": {"architecture": "gpt2"},
            "data": {"sequence_length": LENGTH, "packing": "padded" if padded else "packed"},
        }
    )
    case = Case(
        experiment=experiment,
        source="faults.yaml",
        config=plain.config,
        batch=EffectiveBatch(ranks, steps, rows),
        zero_stage=stage,
        precision=precision,
        accumulation_dtype=precision,
        gradient_clipping=clipping,
        vocabulary=Vocabulary(VOCABULARY, end_token=1, pad_token=0),
        order=OrderRule(SAMPLES, last_window, seed=0),
        samples=samples,
        probe_samples=samples,
        windows=tuple(
            WindowChoice(SAMPLES // plain.batch.total if index == 1 and last_window == "short" else index, probe=False)
            for index in range(windows)
        ),
        loop=loop,
        fault=fault,
    )
    return fault_of(fault).request(case)


@dataclass
class Run:
    """What a case left on one rank.

    Attributes:
        windows: as captured.
        start: checksums after planting, before the first window.
        left: what a fault planted and did not take away again.
        seen: what ``watch`` returned.
    """

    windows: list[WindowCapture] = field(default_factory=list)
    start: dict[str, int] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    seen: Any = None

    def gradient(self, window: int = 0, step: int = 0) -> dict[str, Tensor]:
        found = self.windows[window].steps[step].gradients
        return {name: tensor.double() for name, tensor in found.items() if tensor is not None}

    def saw(self, window: int = 0) -> dict[str, Tensor]:
        """The gradient that reached the optimizer."""
        return {name: seen.values for name, seen in (self.windows[window].steps[0].saw or {}).items()}

    @property
    def boundaries(self) -> list[list[int]]:
        return [[step.micro_step for step in window.steps] for window in self.windows]

    @property
    def rates(self) -> list[float]:
        """The rate of each step."""
        steps = [step for window in self.windows for step in window.steps]
        return [next(iter(step.before.options.values()))["lr"] for step in steps if step.before]


Watch = Callable[[Subject, Callable[[], object]], Any]
"""Runs its second argument, the loop, under some instrument, and returns what it saw."""


def run(ranks: Ranks, case: Case, watch: Watch | None = None) -> Run:
    """The case through the loop under test as on a rank of ``verify``: under capture, or under ``watch`` instead."""
    fault = fault_of(case.fault)
    assert fault.inapplicable(case) is None
    altered = fault.alter(case)
    loss = build_loss(case.experiment.loss.factory, source=case.source)
    engine = WindowEngine(fault.alter_model(fault.request_model(tiny_gpt())), altered.config, altered.batch, loss)
    subject = Subject(engine, ranks, StillDog())
    before = _plantable(engine.engine)
    torch.manual_seed(ranks.rank)
    result = Run()
    with fault.planted(subject, altered):
        result.start = parameter_checksums(engine.engine)
        windows = fault.feed(case_stream(case, ranks.rank), case, ranks.rank)
        loop = loop_of(case.loop)
        if watch is not None:
            result.seen = watch(subject, lambda: loop(subject, windows))
        else:
            with captured(subject, windows, result.windows.append) as stream:
                loop(subject, stream)
    after = _plantable(engine.engine)
    result.left = [name for name in before.keys() | after.keys() if before.get(name) is not after.get(name)]
    engine.engine.destroy()
    return result


def _plantable(engine: Any) -> dict[str, Any]:
    """Where faults are planted: methods replaced on the engine itself, settings, hooks."""
    found = {f"engine.{name}": value for name, value in vars(engine).items() if callable(value)}
    found["switch"] = engine.enable_backward_allreduce
    found["limit"] = getattr(engine.optimizer, "clip_grad", None)
    for name, parameter in engine.module.named_parameters():
        for key, hook in (parameter._backward_hooks or {}).items():
            found[f"{name}.{key}"] = hook
    for name, module in engine.module.named_modules():
        for key, hook in module._forward_hooks.items():
            found[f"{name}.{key}"] = hook
    return found


def mean_gradients(case: Case) -> list[list[dict[str, Tensor]]]:
    """Mean gradient of every micro-batch of the first window, [W][N], in float64."""
    model = tiny_gpt().double()
    return [
        [_mean_gradient(model, micro_batch) for micro_batch in case_stream(case, rank).window(0)]
        for rank in range(case.batch.world_size)
    ]


def _mean_gradient(model: nn.Module, micro_batch: dict[str, Tensor]) -> dict[str, Tensor]:
    inputs = {name: field for name, field in micro_batch.items() if name != "labels"}
    logits = model(**inputs).logits[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), micro_batch["labels"][:, 1:].flatten())
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def weighted(case: Case, weights: list[list[float]]) -> dict[str, Tensor]:
    """The gradient that micro-batches of these weights, [W][N], add up to."""
    total: dict[str, Tensor] = {}
    for row, gradients in zip(weights, mean_gradients(case), strict=True):
        for weight, gradient in zip(row, gradients, strict=True):
            for name, tensor in gradient.items():
                total[name] = total.get(name, torch.zeros_like(tensor)) + weight * tensor
    return total


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative, over all tensors together."""
    assert set(found) == set(expected)
    return norm({name: found[name].double() - expected[name].double() for name in expected}) / norm(expected)


def norm(gradient: dict[str, Tensor]) -> float:
    """L2 over all tensors together."""
    return float(torch.stack([tensor.double().square().sum() for tensor in gradient.values()]).sum().sqrt())


def targets(case: Case) -> list[list[int]]:
    """Target tokens of every micro-batch of the first window, [W][N], counted one by one."""
    return [
        [sum(label != -100 for row in micro_batch["labels"].tolist() for label in row[1:]) for micro_batch in window]
        for window in (case_stream(case, rank).window(0) for rank in range(case.batch.world_size))
    ]


def due_weights(case: Case) -> list[list[float]]:
    """What every micro-batch's mean gradient is due, [W][N]: n / T."""
    counted = targets(case)
    total = sum(map(sum, counted))
    return [[count / total for count in row] for row in counted]
