"""``dsaccum audit`` as a command: what is wrong with the input is said at once, before a rank is started.

Run: pytest -n 0 tests/audit/test_command.py. Not covered: a whole run (test_whole.py); what it prints (test_report.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dsaccum.cli import main
from dsaccum.cli.outcome import ExitCode


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--deepspeed", "none.json"], "none.json: there is no such file"),
        (["--ranks", "0"], "--ranks = 0: is no number of ranks; allowed: 1 or more"),
        (["--json", "there.json"], "--json there-2.json"),
        (["--ful"], "--full"),
    ],
)
def test_wrong_input_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.json").write_text("{}")
    monkeypatch.setattr("dsaccum.verification.ranks.pool.RankPool.run", lambda *_: pytest.fail("ranks were used"))
    assert main(["audit", *flags]) == ExitCode.WRONG_INPUT
    said = capsys.readouterr()
    [line] = [line for line in said.err.splitlines() if line.startswith("error: ")]
    assert words in line
    assert said.out == ""
