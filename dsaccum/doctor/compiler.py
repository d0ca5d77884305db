"""What compiles DeepSpeed's own operations. Training as shipped needs none of it."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Iterator

from dsaccum.doctor.finding import Finding
from dsaccum.doctor.machine import Machine, python
from dsaccum.doctor.torch_build import TorchBuild

_VERSION_S = 5.0
_DEFAULT = "c++"
"""What torch calls where CXX is not set."""
_NOT_COMPILED = 'optimizers without "torch_adam": true (FusedAdam) and CPU offload cannot be compiled'
_INSTALL = "sudo apt-get install g++"


def check_compiler(machine: Machine) -> Iterator[Finding]:
    """The C++ compiler, ninja, and with a GPU nvcc."""
    yield _compiler(machine)
    if machine.program("ninja") is None:
        yield _no_ninja()
    build = TorchBuild.installed()
    if build is not None and build.cuda is not None and machine.gpu_devices and not _has_nvcc(machine):
        fix = "export CUDA_HOME=/usr/local/cuda  # or wherever the CUDA toolkit is installed"
        yield Finding("nvcc", "not found", "note", "FusedAdam cannot be compiled for the GPU", fix)


def _compiler(machine: Machine) -> Finding:
    named = machine.environment.get("CXX")
    program = machine.program(named or _DEFAULT)
    if program is not None:
        answer = machine.answer(program, "--version", within_s=_VERSION_S)
        first = next(iter(answer.output.splitlines()), "")
        if answer.code == 0:
            return Finding("C++ compiler", first or program)
        return Finding("C++ compiler", program, "note", f"{_NOT_COMPILED}: {answer.complaint}", _INSTALL)
    if named:
        return Finding("C++ compiler", f"CXX={named}, which is not there", "note", _NOT_COMPILED, "unset CXX")
    other = next((name for name in ("g++", "clang++") if machine.program(name)), None)
    if other is not None:
        return Finding("C++ compiler", f"{other}, but no c++", "note", _NOT_COMPILED, f"export CXX={other}")
    return Finding("C++ compiler", "none", "note", _NOT_COMPILED, _INSTALL)


def _no_ninja() -> Finding:
    scripts = sysconfig.get_path("scripts")
    if shutil.which("ninja", path=scripts):  # a virtual environment that is used without being activated
        return Finding("ninja", "not on PATH", "note", _NOT_COMPILED, f'export PATH="{scripts}:$PATH"')
    return Finding("ninja", "none", "note", _NOT_COMPILED, f"{python()} -m pip install ninja")


def _has_nvcc(machine: Machine) -> bool:
    homes = (
        machine.environment.get("CUDA_HOME"),
        machine.environment.get("CUDA_PATH"),
        machine.root / "usr/local/cuda",
    )
    return machine.program("nvcc") is not None or any(machine.program(f"{home}/bin/nvcc") for home in homes if home)
