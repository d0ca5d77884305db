"""The pytest plugin that is there wherever dsaccum is installed: one fixture, and nothing heavy until it is used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from dsaccum.verification.ranks.pools import RankPools


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPools]:
    """Ranks for ``dsaccum.testing.assert_same_update``: started when first needed, kept, ended with the session."""
    from dsaccum.verification.ranks.pools import RankPools

    with RankPools() as pools:
        yield pools
