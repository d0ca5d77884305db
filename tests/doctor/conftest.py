"""A machine without anything, and a place for packages that comes before all others."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from dsaccum.doctor.machine import Machine
from tests.doctor import planting


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages planted here hide the installed ones, as long as they are planted before the first look."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    return site


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    return root


@pytest.fixture
def bare(root: Path) -> Machine:
    return planting.machine(root)
