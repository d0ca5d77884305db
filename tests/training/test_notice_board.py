"""No word that ranks leave for one another is waited for longer than a limit.

Run: pytest tests/training/test_notice_board.py. A wire that is really cut: tests/endurance/test_two_machines.py.
"""

from __future__ import annotations

import threading
import time

import pytest

from dsaccum.training import notice_board
from dsaccum.training.notice_board import NoticeBoard


class Store:
    """As torch's; while ``cut``, it does not answer."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.connected = threading.Event()
        self.connected.set()

    def set(self, key: str, text: str) -> None:
        self.connected.wait(10)
        self.kept[key] = text.encode()

    def check(self, keys: list[str]) -> bool:
        self.connected.wait(10)
        return keys[0] in self.kept

    def get(self, key: str) -> bytes:
        return self.kept[key]


def test_a_board_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice_board, "LIMIT_S", 0.1)
    store = Store()
    board = NoticeBoard(store)
    board.write("a", "1")
    assert board.read(["a", "b"]) == ["1", None]
    store.connected.clear()
    started = time.monotonic()
    board.write("a", "2")
    assert board.read(["a"]) is None
    assert time.monotonic() - started < 1
    store.connected.set()
    time.sleep(0.1)
    assert board.read(["a"]) == ["2"], "it is asked again once it has answered"


def test_a_board_that_has_ended_is_none() -> None:
    class Ended(Store):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("connection reset by peer")

    assert NoticeBoard(Ended()).read(["a"]) is None
