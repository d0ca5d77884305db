"""Copies of the parameters on different ranks are compared to the bit, and one flipped bit is found and named.

Run: pytest tests/instruments/test_replicas.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsaccum.instruments.replicas import checksum
from tests.instruments.ledger import KINDS, SHAPES


@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS)
def test_one_bit_on_one_rank_is_found(two_ranks: list[dict[str, Any]], kind: str) -> None:
    for found in two_ranks:
        replicas = found[kind]["replicas"]
        assert replicas["clean"] == []
        assert replicas["touched"] == ["bias"]
        everything = {*SHAPES, "frozen", "unused"}
        # ZeRO 3 keeps only small parameters whole on each rank (up to 6 elements here).
        assert set(replicas["held"]) == ({"bias", "scale", "unused"} if kind.endswith("3") else everything)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70), st.integers(0, 10**9), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_any_flipped_bit_changes_the_checksum(count: int, seed: int, dtype: torch.dtype) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)
    raw = values.clone().view(torch.uint8)
    raw[seed % raw.numel()] ^= 1 << (seed % 8)
    assert checksum(values) == checksum(values.clone())
    assert checksum(values) != checksum(raw.view(dtype))


def test_exchanged_values_change_the_checksum() -> None:
    values = torch.arange(64.0)
    assert checksum(values) != checksum(values.flip(0))
