"""Machines made by hand: folders, environments, packages and commands that the checks take for real ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from dsaccum.doctor.finding import Finding
from dsaccum.doctor.machine import Machine


def machine(root: Path, environment: Mapping[str, str] | None = None) -> Machine:
    """With an empty PATH, unless the environment has one."""
    return Machine(environment={"PATH": str(root / "bin"), "HOME": str(root), **(environment or {})}, root=root)


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def command(root: Path, name: str, script: str) -> None:
    """A command on the machine's PATH, as a shell script."""
    write(root, {f"bin/{name}": f"#!/bin/sh\n{script}\n"})
    (root / "bin" / name).chmod(0o755)


def package(site: Path, name: str, version: str, metadata: str = "") -> None:
    """Its metadata only, which is all that is read of most."""
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}"
    write(site, {f"{name}-{version}.dist-info/METADATA": text})


def torch(site: Path, version: str = "2.13.0+cpu", cuda: str | None = None, hip: str | None = None) -> None:
    """The file that says what a torch was built for, as torch writes it, in a package that cannot be imported."""
    source = (
        f"from typing import Optional\n__version__ = {version!r}\ndebug = False\n"
        f"cuda: Optional[str] = {cuda!r}\nhip: Optional[str] = {hip!r}\n"
    )
    write(site, {"torch/__init__.py": "raise ImportError('torch was imported')\n", "torch/version.py": source})


def only(findings: Iterable[Finding], name: str) -> Finding:
    """The one with this name."""
    [finding] = [each for each in findings if each.name == name]
    return finding


def states(findings: Iterable[Finding]) -> dict[str, str]:
    return {each.name: each.state for each in findings}
