"""Python and the packages that dsaccum needs, by their metadata: nothing is imported."""

from __future__ import annotations

import platform
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec

from dsaccum import __version__
from dsaccum.doctor.finding import Finding
from dsaccum.doctor.machine import Machine, python

_TRAINED_WITH = ("torch", "deepspeed", "transformers")


def check_python(machine: Machine) -> Iterator[Finding]:
    """The interpreter and the system."""
    found = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    if platform.system() == "Linux":
        yield Finding("python", found)
    else:
        yield Finding("python", found, "note", "dsaccum was measured on Linux only")


def check_packages(machine: Machine) -> Iterator[Finding]:
    """Every requirement of dsaccum: installed, and new enough."""
    try:
        needed = [_Requirement.of(line) for line in requires("dsaccum") or () if "extra ==" not in line]
    except PackageNotFoundError:
        reason, fix = "dsaccum is not installed, so what it needs is not known", f"{python()} -m pip install -e ."
        yield Finding("packages", _listed(_TRAINED_WITH), "note", reason, fix)
        return
    yield Finding("packages", _listed(each.name for each in needed if each.is_met()))
    yield from (each.finding() for each in needed if not each.is_met())
    if find_spec("packaging") is None:  # comes with torch's and DeepSpeed's own requirements
        fix = f"{python()} -m pip install packaging"
        yield Finding("packaging", "not installed", "problem", "DeepSpeed cannot start without it", fix)


def installed_version(package: str) -> str | None:
    """As its metadata says; None where it is not installed."""
    try:
        return version(package) or None  # None where the metadata is damaged
    except PackageNotFoundError:
        return None


def installed_versions() -> dict[str, str | None]:
    """Those that a record keeps."""
    return {
        "dsaccum": __version__,
        **{name: installed_version(name) for name in _TRAINED_WITH},
        "python": platform.python_version(),
    }


@dataclass(frozen=True)
class _Requirement:
    """One line of dsaccum's own metadata, such as ``torch>=2.6``."""

    name: str
    line: str

    @classmethod
    def of(cls, line: str) -> _Requirement:
        return cls(re.split(r"[^\w.-]", line, maxsplit=1)[0], line)

    def is_met(self) -> bool:
        found = installed_version(self.name)
        return found is not None and _is_in_range(found, self.line)

    def finding(self) -> Finding:
        fix = f"{python()} -m pip install {shlex.quote(self.line)}"
        found = installed_version(self.name) or "not installed"
        return Finding(self.name, found, "problem", f"dsaccum needs {self.line}", fix)


def _is_in_range(version: str, line: str) -> bool:
    try:
        from packaging.requirements import Requirement
    except ImportError:  # a problem of its own
        return True
    return Requirement(line).specifier.contains(version, prereleases=True)


def _listed(names: Iterable[str]) -> str:
    versions = {"dsaccum": __version__, **{name: installed_version(name) for name in names}}
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)
