"""Whether single rows were fed twice in a window, to two ranks or in two micro-steps, where whole micro-batches differ.

A data set may hold a row twice. If that is all, copies meet within a rank as often as there are pairs of rows within
ranks, and between ranks likewise: with A pairs of rows between ranks, B within, that k copies are all between is
(A / (A + B))^k probable. Only below 1 % it is held to be wrong; else people are told.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from dsaccum.report.figures import counted
from dsaccum.watch.outputs import tensors_in

FEWEST_BITS = 40
"""A row that holds less may well be another's by chance: 16 tokens of 6 different ones have 41."""
BITS_OF_A_NUMBER = 8
IMPROBABLE = 0.01
LOOKED_AT = 4096
"""Numbers of a row, to see how much it holds."""

RowPrints = tuple[str | None, ...]
"""Of one micro-step's rows; None for one that holds too little to be told from others."""


def prints_of(arguments: Any, keywords: Mapping[str, Any]) -> RowPrints:
    """Of one forward: a row's inputs without padding, with all else that the forward was given for it."""
    fields = [t.detach().cpu() for _, t in tensors_in([arguments, keywords]) if t.dim() > 0 and t.shape[0] > 0]
    tokens = keywords.get("input_ids")
    main = tokens.detach().cpu() if isinstance(tokens, Tensor) else next((f for f in fields if f.dim() > 1), None)
    if main is None or main.dim() < 2:
        return ()
    mask = keywords.get("attention_mask")
    kept = mask.detach().cpu() != 0 if isinstance(mask, Tensor) and mask.shape == main.shape else _without_tail(main)
    rowwise = [field for field in fields if len(field) == len(main)]
    return tuple(_print(row, main, kept, rowwise) for row in range(len(main)))


def _without_tail(main: Tensor) -> Tensor:
    """Padding that nobody names: the same number again and again at a row's end."""
    if main.dim() != 2 or main.is_floating_point():
        return torch.ones(main.shape[:2] if main.dim() > 1 else main.shape, dtype=torch.bool)
    other = main != main[:, -1:]
    return other.flip(1).cumsum(1).flip(1) > 0


def _print(row: int, main: Tensor, kept: Tensor, fields: Sequence[Tensor]) -> str | None:
    own = main[row][kept[row]].flatten()[:LOOKED_AT]
    kinds = len(own.unique())
    bits = BITS_OF_A_NUMBER * kinds if main.is_floating_point() else len(own) * math.log2(max(kinds, 1))
    if bits < FEWEST_BITS:
        return None
    digest = hashlib.blake2b(digest_size=12)
    for field in fields:
        values = field[row][kept[row]] if field.shape[:2] == kept.shape else field[row]
        digest.update(values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class FedTwice:
    """Rows that came more than once.

    Attributes:
        rows: all that can be told from others.
        on_ranks: different ones that were fed to more than one rank.
        within: different ones that one rank was fed in more than one micro-step.
        where: (micro-step, rank), from 1 and 0, of one that two ranks were fed.
        by_chance: probability that a data set with copies in it would give all those of ``on_ranks`` to two ranks.
    """

    rows: int
    on_ranks: int
    within: int
    where: tuple[tuple[int, int], ...]
    by_chance: float

    @property
    def wrong(self) -> bool:
        """No chance."""
        return self.on_ranks > 0 and self.by_chance < IMPROBABLE


def fed_twice(ranks: Sequence[Sequence[RowPrints]], calls: Sequence[Sequence[int]]) -> FedTwice:
    """Look for them.

    Args:
        ranks: prints of each micro-step's rows, by rank.
        calls: what tells micro-steps apart: two backward passes of one call are of the same rows.
    """
    places: dict[str, dict[tuple[int, int], int]] = defaultdict(dict)
    held = [0] * len(ranks)
    for r, steps in enumerate(ranks):
        for k, prints in enumerate(steps):
            for each in prints:
                place = (r, calls[r][k])
                if each is not None and place not in places[each]:
                    places[each][place] = k
                    held[r] += 1
    shared = [at for at in places.values() if len({r for r, _ in at}) > 1]
    within = [at for at in places.values() if len({r for r, _ in at}) < len(at)]
    between = sum(one * other for one, other in combinations(held, 2))
    pairs = between + sum(n * (n - 1) // 2 for n in held)
    chance = (between / pairs) ** len(shared) if pairs and not within else 1.0
    where = tuple((k + 1, r) for (r, _), k in shared[0].items()) if shared else ()
    return FedTwice(sum(held), len(shared), len(within), where, chance)


def rows_text(found: FedTwice) -> str:
    """Of rows on several ranks."""
    first = " and ".join(f"micro-step {k} of rank {r}" for k, r in found.where[:2])
    return f"{found.on_ranks} of {counted(found.rows, 'row')} came to more than one rank, one in {first}"


def rows_notes(found: FedTwice) -> list[str]:
    """What may be right, and may be not."""
    notes = []
    if found.on_ranks and not found.wrong:
        notes.append(
            f"{rows_text(found)}: the data holds them twice, or each rank draws from all of it, where a "
            "DistributedSampler gives each its own part"
        )
    if found.within:
        notes.append(
            f"{found.within} of {counted(found.rows, 'row')} came to a rank in more than one micro-step: the data "
            "holds them twice, or they were drawn twice"
        )
    return notes
