"""Packages are judged by their metadata: missing, too old, or of a DeepSpeed that is known to be wrong.

Run: pytest tests/doctor/test_packages.py -n 0. Not covered: packages that are installed and broken.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

from dsaccum.doctor import packages
from dsaccum.doctor.finding import Finding
from dsaccum.doctor.known_versions import KNOWN_FAULTS, NEWEST_MEASURED, check_deepspeed
from dsaccum.doctor.machine import Machine
from dsaccum.doctor.packages import check_packages, check_python, installed_versions
from tests.docs.markdown import REPOSITORY, anchors
from tests.doctor import planting

NEEDS = """Requires-Dist: some-engine>=0.16.4
Requires-Dist: some-model>=2.6
Requires-Dist: some-tests>=8.2; extra == "test"
"""


@pytest.fixture
def needing(site: Path) -> Path:
    planting.package(site, "dsaccum", "0.1.0", NEEDS)
    return site


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "python", lambda: "python")


def test_all_there_and_new_enough(needing: Path, bare: Machine) -> None:
    planting.package(needing, "some_engine", "0.19.8")
    planting.package(needing, "some_model", "2.13.0+cpu")
    [finding] = check_packages(bare)
    assert finding.state == "ok"
    assert finding.found.endswith("some-engine 0.19.8, some-model 2.13.0+cpu"), "what tests need is nobody else's"


@pytest.mark.usefixtures("here")
def test_missing_and_too_old(needing: Path, bare: Machine) -> None:
    planting.package(needing, "some_model", "2.5.1")
    assert list(check_packages(bare))[1:] == [
        Finding("some-engine", "not installed", "problem", "dsaccum needs some-engine>=0.16.4",
                "python -m pip install 'some-engine>=0.16.4'"),
        Finding("some-model", "2.5.1", "problem", "dsaccum needs some-model>=2.6",
                "python -m pip install 'some-model>=2.6'"),
    ]  # fmt: skip


@pytest.mark.usefixtures("here")
def test_without_packaging_what_is_missing_is_still_said(
    needing: Path, bare: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "packaging.requirements", None)
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    planting.package(needing, "some_model", "2.5.1")
    findings = list(check_packages(bare))
    assert planting.states(findings) == {"packages": "ok", "some-engine": "problem", "packaging": "problem"}
    assert findings[-1].fix == "python -m pip install packaging"


def test_a_checkout_that_is_not_installed_is_a_note(bare: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> list[str]:
        raise packages.PackageNotFoundError(name)

    monkeypatch.setattr(packages, "requires", not_installed)
    [finding] = check_packages(bare)
    assert (finding.state, finding.fix.endswith("pip install -e .")) == ("note", True)


def test_versions_for_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "installed_version", lambda name: None if name == "torch" else "1.0")
    found = installed_versions()
    assert list(found) == ["dsaccum", "torch", "deepspeed", "transformers", "python"]
    assert (found["torch"], found["deepspeed"]) == (None, "1.0")


def test_another_system_than_linux_is_a_note(bare: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for system, state in (("Linux", "ok"), ("Darwin", "note")):
        monkeypatch.setattr(platform, "system", lambda system=system: system)
        [finding] = check_python(bare)
        assert finding.state == state
        assert system in finding.found


# --- DeepSpeed's versions ---


@pytest.mark.parametrize(
    ("version", "state"),
    [("0.16.4", "ok"), ("0.18.2", "ok"), ("0.18.3", "problem"), ("0.18.10", "problem"), ("0.19.5", "problem"),
     ("0.19.5+local", "problem"), ("0.19.6", "ok"), ("0.19.8", "ok"), ("0.20.0", "note")],
)  # fmt: skip
def test_versions_of_deepspeed(version: str, state: str, site: Path, bare: Machine) -> None:
    planting.package(site, "deepspeed", version)
    [finding] = check_deepspeed(bare)
    assert (finding.name, finding.state) == ("deepspeed", state)
    assert version in finding.found
    if state == "problem":
        assert "divided by N twice" in finding.consequence
        assert finding.fix.endswith(f" -m pip install deepspeed=={NEWEST_MEASURED}")


def test_no_deepspeed_is_said_once(bare: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the check of the packages."""
    monkeypatch.setattr("dsaccum.doctor.known_versions.installed_version", lambda name: None)
    assert list(check_deepspeed(bare)) == []


def test_what_is_known_is_explained_and_the_fix_does_not_have_it() -> None:
    from packaging.version import Version

    for fault in KNOWN_FAULTS:
        path, _, anchor = fault.explained.partition("#")
        assert anchor in anchors(REPOSITORY / path)
        assert Version(fault.first) <= Version(fault.last) < Version(NEWEST_MEASURED)
    assert f"deepspeed=={NEWEST_MEASURED}\n" in (REPOSITORY / "constraints.txt").read_text(), "what CI runs"
