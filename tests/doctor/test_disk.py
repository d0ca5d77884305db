"""Folders that are written to, and the room in them.

Run: pytest tests/doctor/test_disk.py -n 0. Not covered: quotas of a user, and inodes.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsaccum.doctor import disk
from dsaccum.doctor.disk import check_disk, check_temporary_folder
from dsaccum.doctor.finding import Finding
from tests.doctor import planting


@pytest.fixture(autouse=True)
def _in_a_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "tmp").mkdir()
    (root / "work").mkdir()
    monkeypatch.chdir(root / "work")


@pytest.fixture
def nothing_is_writable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write anywhere, so permissions of files would not do."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)


def test_the_temporary_folder_is_the_one_that_is_named(root: Path) -> None:
    assert list(check_temporary_folder(planting.machine(root))) == [Finding("temporary files", str(root / "tmp"))]
    named = planting.machine(root, {"TMPDIR": str(root / "work")})
    assert [each.found for each in check_temporary_folder(named)] == [str(root / "work")]


def test_a_name_that_leads_nowhere(root: Path) -> None:
    findings = list(check_temporary_folder(planting.machine(root, {"TMPDIR": str(root / "no")})))
    assert [(each.state, each.fix) for each in findings] == [("ok", ""), ("note", "unset TMPDIR")]
    assert findings[0].found == str(root / "tmp")


@pytest.mark.usefixtures("nothing_is_writable")
def test_no_temporary_folder_at_all(root: Path) -> None:
    [finding] = check_temporary_folder(planting.machine(root))
    assert (finding.state, finding.fix) == ("problem", 'mkdir -p "$HOME/tmp" && export TMPDIR="$HOME/tmp"')


@pytest.mark.parametrize(
    ("free", "state", "said"),
    [(50 << 30, "ok", "50.0 GiB"), (1 << 30, "note", "1.0 GiB"), (5 << 20, "problem", "5.0 MiB")],
)
def test_room(free: int, state: str, said: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All folders here are on one file system, so there is one answer."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    machine = planting.machine(root, {"TORCH_EXTENSIONS_DIR": str(root / "not" / "yet")})
    [finding] = check_disk(machine)
    assert finding.state == state
    assert finding.found == f"{said} free for runs, temporary files, extensions, the Hugging Face cache"
    assert finding.fix.startswith("du ") == (state != "ok")


def test_a_cache_that_cannot_be_written_to(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = root / "locked"
    locked.mkdir()
    monkeypatch.setattr(disk, "_is_usable", lambda folder: folder != locked)
    findings = list(check_disk(planting.machine(root, {"HF_HOME": str(locked / "hub")})))
    [finding] = [each for each in findings if "cannot be written to" in each.found]
    assert (finding.state, finding.fix) == ("note", f"ls -ld {locked}")
