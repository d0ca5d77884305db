"""A verification that is a stub: what the command makes of its result is what is tested here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dsaccum.cli import main
from dsaccum.verification.cases.arguments import VerifyArguments
from dsaccum.verification.progress import Progress
from dsaccum.verification.records.record import VerifyRecord
from dsaccum.verification.resumed.arguments import ResumeArguments
from tests.report import records

Arguments = VerifyArguments | ResumeArguments
Result = VerifyRecord | BaseException | Callable[[], Any]


def run(*words: str) -> int:
    """``dsaccum verify`` of the config in ``in_a_folder``, with further words."""
    return main(["verify", "--deepspeed", "ds.json", *words])


class StubVerify:
    """Gives, raises or does what it is told to, and remembers what it was asked."""

    def __init__(self) -> None:
        self.result: Result = records.record()
        self.calls: list[tuple[Any, Any]] = []

    def verify(
        self, arguments: VerifyArguments | ResumeArguments, progress: Progress, pools: Any = None
    ) -> VerifyRecord:
        self.calls.append((arguments, pools))
        progress.stage("comparing")
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result if isinstance(self.result, VerifyRecord) else self.result()


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubVerify:
    stub, module = StubVerify(), ModuleType("dsaccum.verification.verify")
    module.verify = stub.verify  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    of_a_run = ModuleType("dsaccum.verification.resumed.verify")
    of_a_run.verify_resumed = stub.verify  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, of_a_run.__name__, of_a_run)
    return stub


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With the two files that the commands here name."""
    (tmp_path / "ds.json").write_text('{"gradient_accumulation_steps": 4}')
    (tmp_path / "e.yaml").write_text("name: small")
    monkeypatch.chdir(tmp_path)
    return tmp_path
