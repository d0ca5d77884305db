"""The operating system's witness sees memory that is touched, also where it is given back again."""

from __future__ import annotations

import sys

import pytest
import torch

from dsaccum.bench.resident import resident_growth

SIZE = 64 * 2**20


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells it")
def test_a_peak_is_seen_though_it_is_over() -> None:
    grown = resident_growth(lambda: torch.ones(SIZE // 4))
    assert grown is not None
    assert 0.9 * SIZE < grown < 1.5 * SIZE


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells it")
def test_nothing_is_seen_where_nothing_is_needed() -> None:
    grown = resident_growth(lambda: None)
    assert grown is not None
    assert grown < SIZE // 8
