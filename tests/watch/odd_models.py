"""A model of a few hundred parameters with a middle part to choose, and a loop over random words, for odd scripts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, WIDTH, WINDOW = 32, 16, 4


class Cache:
    """What a forward leaves something in."""

    def __init__(self) -> None:
        self.kept: list[int] = []


class Model(nn.Module):
    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        state = torch.get_rng_state()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.middle = middle if middle is not None else nn.Identity()
        torch.set_rng_state(state)

    def forward(self, x: Any, noise: torch.Generator | None = None, cache: Cache | None = None) -> Tensor:
        values = self.embed(x if isinstance(x, Tensor) else next(x))
        if noise is not None:
            values = values + torch.rand(WIDTH, generator=noise)
        if cache is not None:
            cache.kept.append(len(x))
            values = values * len(cache.kept)
        return self.head(self.middle(values))


class LayerDrop(nn.Module):
    """Left out by chance."""

    def __init__(self, draw: Callable[[], float] | None = None, own: torch.Generator | None = None) -> None:
        super().__init__()
        self.layer, self.draw, self.own = nn.Linear(WIDTH, WIDTH), draw, own

    def forward(self, x: Tensor) -> Tensor:
        drawn = float(torch.rand((), generator=self.own)) if self.draw is None else self.draw()
        return x + self.layer(x) * (drawn < 0.5)


class Alpha(nn.Module):
    """Faded in by an attribute."""

    alpha = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.alpha * self.layer(x)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).real


def micro_batches(count: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(WORDS, (2, 8), generator=draw) for _ in range(2)) for _ in range(count)]  # type: ignore


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def train(
    model: nn.Module,
    *optimizers: torch.optim.Optimizer,
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
    call: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x),
    before: Callable[[int, nn.Module, Any], None] = lambda window, model, optimizer: None,
) -> nn.Module:
    """Five windows; ``before`` is called before each."""
    used = optimizers or (torch.optim.AdamW(model.parameters(), lr=1e-3),)
    for number, (x, labels) in enumerate(micro_batches(5 * WINDOW)):
        if number % WINDOW == 0:
            before(number // WINDOW, model, used[0])
        (loss(call(model, x), labels) / WINDOW).backward()
        if number % WINDOW == WINDOW - 1:
            for optimizer in used:
                optimizer.step()
                optimizer.zero_grad()
    return model
