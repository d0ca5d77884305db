"""Ranks that wait for a slow one: as long as it moves, however long that is; and not for one that hangs.

Run: pytest tests/training/test_gathering.py. A slow disk in a run of two ranks: tests/endurance/test_fault_table.py.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from dsaccum.engine.process import Ranks
from dsaccum.training import gathering, watchdog
from dsaccum.training.gathering import Gathering
from dsaccum.training.stop_request import StopRequest
from dsaccum.training.watchdog import Watchdog

LIMIT_S = 0.6


class Store:
    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def set(self, key: str, text: str) -> None:
        self.kept[key] = text.encode()

    def check(self, keys: list[str]) -> bool:
        return keys[0] in self.kept

    def get(self, key: str) -> bytes:
        return self.kept[key]


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Watchdog], list[Gathering], list[str]]:
    """Two ranks in this process, whose heartbeats come ten times a second, and what ended one of them."""
    monkeypatch.setattr(watchdog, "BEAT_S", 0.1)
    monkeypatch.setattr(gathering, "LONGEST_S", 0.05)
    store, ended = Store(), []
    monkeypatch.setattr(watchdog.dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(watchdog, "say", ended.append)
    places = [Ranks(rank, 2, rank, 2, launched=False) for rank in range(2)]
    dogs = [Watchdog(place, LIMIT_S, StopRequest()) for place in places]
    monkeypatch.setattr(watchdog, "end_now", lambda _: [dog.stop() for dog in dogs])
    return dogs, [Gathering(*each, store) for each in zip(places, dogs, strict=True)], ended


def test_a_slow_rank_that_moves_is_waited_for(two_ranks: Any) -> None:
    dogs, gatherings, ended = two_ranks
    for dog in dogs:
        dog.at(6, 0, "checkpoint")
        dog.start()
    waiting = threading.Thread(target=gatherings[1].wait, daemon=True)
    waiting.start()
    until = time.monotonic() + 3 * LIMIT_S
    while time.monotonic() < until:
        dogs[0].moved()  # it writes, piece by piece
        time.sleep(0.05)
    assert waiting.is_alive(), "it has not come yet"
    assert ended == []
    gatherings[0].wait()
    waiting.join(2)
    assert not waiting.is_alive()
    for dog in dogs:
        dog.stop()


def test_one_that_hangs_is_named(two_ranks: Any) -> None:
    dogs, gatherings, ended = two_ranks
    for dog in dogs:
        dog.at(6, 0, "checkpoint")
        dog.start()
    threading.Thread(target=gatherings[1].wait, daemon=True).start()
    until = time.monotonic() + 10 * LIMIT_S
    while not ended and time.monotonic() < until:
        time.sleep(0.05)
    assert (
        ended[0] == f"error: no progress for {LIMIT_S:g} s (run.timeout_s): rank 0 hangs in the checkpoint after step 5"
    )
    for dog in dogs:
        dog.stop()
