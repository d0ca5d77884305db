"""Progress is a line for each stage in a log, and a line that moves on a terminal.

Run: pytest tests/report/test_progress.py -n 0.
"""

from __future__ import annotations

import io
import re

import pytest

from dsaccum.report.progress import Progress, SilentProgress, shown_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def work(progress: Progress) -> None:
    progress.stage("starting 2 ranks")
    progress.detail("rank 1 [of 2]")
    progress.stage("comparing")


def test_a_log_gets_a_line_for_each_stage() -> None:
    stream = io.StringIO()
    with shown_progress(stream) as progress:
        work(progress)
    assert re.fullmatch(r" +\d+ s  starting 2 ranks\n +\d+ s  comparing\n", stream.getvalue())


def test_a_terminal_is_left_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    with shown_progress(stream) as progress:
        work(progress)
    assert "comparing" in stream.getvalue()
    assert stream.getvalue().endswith("\x1b[2K"), "the line is erased"


def test_a_closed_log_does_not_stop_the_work() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with shown_progress(Closed()) as progress:
        work(progress)


def test_silence() -> None:
    work(SilentProgress())
