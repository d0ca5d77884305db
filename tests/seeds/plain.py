"""Plain PyTorch over one big batch a step, and how far rounding alone takes it: the bound of a whole trajectory.

A correct run drifts away from any other by rounding. So the bound is drawn, not chosen: the same plain run is made with
every parameter one unit in the last place off (three draws), and once more from micro-batches added up; three times the
furthest of them is allowed. Nothing of the product's side is in it but samples and order. The loss goes through the
kernel of torch that the product's goes through too: its two kernels differ by more than a draw where losses near 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases import BETAS, EPS, WEIGHT_DECAY, Case, big_batch, tiny_gpt

SAFETY = 3.0
SGD_RATE, MOMENTUM = 0.25, 0.5


@dataclass(frozen=True)
class SgdCase(Case):
    """With SGD. AdamW's first steps hide a wrong gradient, since they only ask for its sign; SGD shows it whole."""

    @property
    def config(self) -> dict[str, Any]:
        sgd = {"type": "SGD", "params": {"lr": SGD_RATE, "momentum": MOMENTUM}}
        kept = {key: value for key, value in super().config.items() if key != "scheduler"}
        return {**kept, "optimizer": sgd, "zero_allow_untested_optimizer": True}


@dataclass(frozen=True)
class Trained:
    """A plain run: the loss of each step, the parameters after the last."""

    losses: list[float]
    parameters: dict[str, Tensor]


@dataclass(frozen=True)
class Honest:
    """The plain run, and others that differ from it by rounding alone."""

    run: Trained
    others: list[Trained] = field(default_factory=list)

    def loss_bound(self) -> float:
        """For the largest relative difference of losses."""
        return SAFETY * max(furthest(other.losses, self.run.losses) for other in self.others)

    def parameter_bounds(self) -> dict[str, float]:
        """For the L2 distance of each parameter; at least the rounding of what was stored at each step, 2**-24."""
        return {
            name: SAFETY * max(float((other.parameters[name] - value).norm()) for other in self.others)
            + len(self.run.losses) * 2.0**-24 * float(value.norm())
            for name, value in self.run.parameters.items()
        }


def honest_runs(case: Case) -> Honest:
    """The big batch, three runs from one ulp away, and one that adds micro-batches up."""
    return Honest(train(case), [train(case, ulp_seed=seed) for seed in range(3)] + [train(case, parts=4)])


def furthest(ours: list[float], truth: list[float]) -> float:
    """The largest relative difference of two sequences."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, truth, strict=True))


def train(case: Case, *, ulp_seed: int | None = None, parts: int = 1) -> Trained:
    """Plain PyTorch, float32.

    Args:
        case: what to train.
        ulp_seed: of the directions in which every parameter starts one unit in the last place off; None for not.
        parts: pieces of each big batch, whose gradients of sum / T are added up.
    """
    model = tiny_gpt()
    if ulp_seed is not None:
        _move_one_ulp(model, ulp_seed)
    sgd = isinstance(case, SgdCase)
    optimizer: torch.optim.Optimizer
    if sgd:
        optimizer = torch.optim.SGD(model.parameters(), lr=SGD_RATE, momentum=MOMENTUM)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    losses = []
    for step in range(case.steps):
        if not sgd:  # WarmupLR, linear over 5 steps from 1e-4; DeepSpeed sets the rate of update 1 twice
            peak = case.config["scheduler"]["params"]["warmup_max_lr"]
            optimizer.param_groups[0]["lr"] = 1e-4 + (peak - 1e-4) * min(1.0, max(0, step - 1) / 5)
        optimizer.zero_grad()
        ids, mask, targets = big_batch(case, step)
        total = int((targets != -100).sum())
        rows = len(ids) // parts
        loss = 0.0
        for first in range(0, len(ids), rows):
            piece = slice(first, first + rows)
            logits = model(input_ids=ids[piece], attention_mask=mask[piece]).logits.flatten(0, 1)
            part = F.cross_entropy(logits, targets[piece].flatten(), ignore_index=-100, reduction="sum") / total
            part.backward()
            loss += part.item()
        if case.clipping:
            nn.utils.clip_grad_norm_(model.parameters(), case.clipping)
        optimizer.step()
        losses.append(loss)
    return Trained(losses, {name: parameter.detach().clone() for name, parameter in model.named_parameters()})


@torch.no_grad()
def _move_one_ulp(model: nn.Module, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        up = torch.randint(2, parameter.shape, generator=random, dtype=torch.bool)
        parameter.copy_(torch.nextafter(parameter, torch.where(up, math.inf, -math.inf)))
