"""Bytes that an engine holds, by category, and the highest that they came to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

Category = Literal["parameters", "gradients", "optimizer", "buffers"]
CATEGORIES: tuple[Category, ...] = ("parameters", "gradients", "optimizer", "buffers")


@dataclass
class Ledger:
    """What is held now, and what was held at the highest moment since ``mark``."""

    held: dict[Category, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    highest: dict[Category, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))

    def mark(self) -> None:
        """Forget what was held before now."""
        self.highest = dict(self.held)

    def take(self, category: Category, size: int) -> None:
        """So many bytes more."""
        self.held[category] += size
        if sum(self.held.values()) > sum(self.highest.values()):
            self.highest = dict(self.held)

    def free(self, category: Category, size: int) -> None:
        """So many bytes less."""
        self.held[category] -= size

    @contextmanager
    def while_needed(self, category: Category, size: int) -> Iterator[None]:
        """Inside, so many bytes more."""
        self.take(category, size)
        yield
        self.free(category, size)
