"""Rank pools that outlive one verification, so that a suite of many starts its ranks once."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsaccum.verification.ranks.pool import RankPool


class RankPools:
    """Keeps one started pool for each world size until ``close``.

    Args:
        threads_per_rank: for computing; None shares this machine's cores among the ranks.
    """

    def __init__(self, *, threads_per_rank: int | None = None) -> None:
        self._pools: dict[int, RankPool] = {}
        self._threads_per_rank = threads_per_rank

    def get(self, world_size: int) -> RankPool:
        """The pool of this many ranks; started when first asked for.

        Raises:
            RankFailed: a rank could not start.
        """
        from dsaccum.verification.ranks.pool import RankPool

        if world_size not in self._pools:
            pool = RankPool(world_size, threads_per_rank=self._threads_per_rank)
            pool.start()
            self._pools[world_size] = pool
        return self._pools[world_size]

    def close(self) -> None:
        """End all ranks. ``get`` starts new ones afterwards."""
        with contextlib.ExitStack() as ending:  # all are closed, even if one fails to
            while self._pools:
                ending.callback(self._pools.popitem()[1].close)

    def __enter__(self) -> RankPools:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
