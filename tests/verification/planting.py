"""Cases small enough to run each fault on, and what a run of one leaves: gradients, snapshots, fed data, restored engine.

The expected gradient is made from each micro-batch's own mean gradient in plain float64 PyTorch and the weights that a
fault is meant to give them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsaccum.batch import EffectiveBatch
from dsaccum.config.experiment import Experiment
from dsaccum.engine.process import Ranks
from dsaccum.engine.window_engine import WindowEngine
from dsaccum.instruments.replicas import parameter_checksums
from dsaccum.loss import build_loss
from dsaccum.verification.capture import WindowCapture, captured
from dsaccum.verification.case import Case, OrderRule, Vocabulary, WindowChoice
from dsaccum.verification.faults import fault_of
from dsaccum.verification.loops import Subject, loop_of
from dsaccum.verification.windows import case_stream
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
) -> Case:
    """Two windows of the tiny GPT, with warm-up from a rate that is not 0."""
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
        order=OrderRule(SAMPLES, "continue", seed=0),
        samples=samples,
        probe_samples=samples,
        windows=tuple(WindowChoice(index, probe=False) for index in range(windows)),
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
        replaced: attributes of engine, optimizer and scheduler that the fault left behind.
        rates: the learning rate used in each window.
        parameters: by name, at the end (not at ZeRO 3).
    """

    windows: list[WindowCapture] = field(default_factory=list)
    start: dict[str, int] = field(default_factory=dict)
    replaced: list[str] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    seen: Any = None

    def gradient(self, window: int = 0, step: int = 0) -> dict[str, Tensor]:
        found = self.windows[window].steps[step].gradients
        return {name: tensor.double() for name, tensor in found.items() if tensor is not None}


Watch = Callable[[Subject, Callable[[], None]], Any]
"""Runs its second argument under some instrument, and returns what it saw."""


def run(ranks: Ranks, case: Case, *, planted: bool = True, watch: Watch | None = None) -> Run:
    """The case through the loop under test and under capture, as on a rank of ``verify``; with ``watch``, uncaptured."""
    fault = fault_of(case.fault if planted else None)
    altered = fault.alter(case)
    engine = WindowEngine(tiny_gpt(), altered.config, altered.batch, build_loss(case.experiment.loss.factory, source=""))
    subject = Subject(engine, ranks, StillDog())
    result = Run()
    owners = {"engine": engine.engine, "optimizer": engine.engine.optimizer, "scheduler": engine.engine.lr_scheduler}
    before = {name: set(vars(owner)) for name, owner in owners.items()}
    torch.manual_seed(ranks.rank)
    with fault.planted(subject, altered):
        result.start = parameter_checksums(engine.engine)
        windows = fault.feed(case_stream(case, ranks.rank), case, ranks.rank)
        if watch is None:
            with captured(subject, windows, result.windows.append) as stream:
                loop_of(case.loop)(subject, stream)
        else:
            result.seen = watch(subject, lambda: loop_of(case.loop)(subject, windows))
    for name, owner in owners.items():
        new = set(vars(owner)) - before[name]
        result.replaced += [f"{name}.{attribute}" for attribute in new if callable(vars(owner)[attribute])]
    result.replaced += _hooks(engine.engine.module)
    if case.zero_stage < 3:
        result.parameters = {name: p.detach().float().clone() for name, p in engine.engine.module.named_parameters()}
    engine.engine.destroy()
    return result


def _hooks(module: nn.Module) -> list[str]:
    """Tensor hooks on parameters, and forward hooks on embeddings, that are still there."""
    left = [name for name, parameter in module.named_parameters() if parameter._backward_hooks]
    return left


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
    error = sum(float((found[name].double() - expected[name].double()).square().sum()) for name in expected)
    size = sum(float(tensor.double().square().sum()) for tensor in expected.values())
    return (error / size) ** 0.5
