"""Parameters that get a gradient and that no optimizer has: they never move, and nobody may ever clear them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from dsaccum.report.figures import counted
from dsaccum.watch.subjects.members import Member


def unowned(module: nn.Module, members: Iterable[Member]) -> list[str]:
    """Their names, at the optimizers' step."""
    owned = {id(p) for member in members for p in member.adapter.stepped.values()}
    named = module.named_parameters()
    return [name for name, p in named if p.requires_grad and p.grad is not None and id(p) not in owned]


def note_of(names: Sequence[str]) -> list[str]:
    """What is said of them: it may be meant so."""
    if not names:
        return []
    gets = "gets a gradient and belongs" if len(names) == 1 else "get a gradient and belong"
    return [f"{counted(len(names), 'parameter')} {gets} to no optimizer, and so won't move: {names[0]}"]
