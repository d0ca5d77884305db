"""Compilers and the cache of what they made: locks that nobody holds, and builds of other environments.

Run: pytest tests/doctor/test_extensions.py -n 0. Not covered: a compilation.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsaccum.doctor import compiler, extension_cache
from dsaccum.doctor.compiler import check_compiler
from dsaccum.doctor.extension_cache import STALE_S, check_extension_cache
from dsaccum.doctor.finding import Finding
from tests.doctor import planting


@pytest.fixture
def cache(root: Path) -> Path:
    folder = root / "the cache"
    folder.mkdir()
    return folder


def look(root: Path, cache: Path) -> list[Finding]:
    return list(check_extension_cache(planting.machine(root, {"TORCH_EXTENSIONS_DIR": str(cache)})))


def lock(cache: Path, age_s: float) -> Path:
    path = cache / "fused_adam" / "lock"
    planting.write(cache, {"fused_adam/lock": ""})
    os.utime(path, (time.time() - age_s, time.time() - age_s))
    return path


def built_with(cache: Path, name: str, packages: Path) -> None:
    flags = (
        f"-I{packages}/deepspeed/ops/csrc/includes -isystem {packages}/torch/include -isystem /usr/include/python3.11"
    )
    planting.write(cache, {f"{name}/build.ninja": f"ninja_required_version = 1.3\ncflags = -DX {flags} -fPIC\n"})


# --- the cache ---


def test_nothing_compiled(root: Path, cache: Path) -> None:
    assert look(root, cache) == [Finding("extensions", f"nothing compiled in {cache}")]
    assert look(root, root / "not" / "there")[0].state == "ok"


def test_a_lock_that_nobody_holds(root: Path, cache: Path) -> None:
    path = lock(cache, STALE_S + 60)
    finding = look(root, cache)[1]
    assert (finding.name, finding.state, finding.found) == ("stale lock", "problem", "fused_adam/lock, 6 min old")
    subprocess.run(["sh", "-c", finding.fix], check=True)
    assert not path.exists(), "the fix removes exactly this file"
    assert path.parent.is_dir()
    assert planting.states(look(root, cache)) == {"extensions": "ok"}


def test_a_young_lock_may_be_somebody_elses(root: Path, cache: Path) -> None:
    path = lock(cache, 5)
    finding = look(root, cache)[1]
    assert (finding.state, finding.fix) == ("note", f"rm {shlex.quote(str(path))}")


def test_a_lock_that_is_held_is_no_stale_one(root: Path, cache: Path) -> None:
    """However old: held as torch holds it, by this process."""
    file_baton = pytest.importorskip("torch.utils.file_baton")
    baton = file_baton.FileBaton(str(cache / "fused_adam" / "lock"))
    (cache / "fused_adam").mkdir()
    assert baton.try_acquire()
    lock(cache, 10 * STALE_S)
    try:
        finding = look(root, cache)[1]
    finally:
        baton.release()
    assert (finding.name, finding.state, finding.fix) == ("lock", "note", "")
    assert f"process {os.getpid()} compiles" in finding.found


def test_builds_of_our_own(root: Path, cache: Path, site: Path) -> None:
    planting.torch(site)
    built_with(cache, "fused_adam", site)
    assert look(root, cache) == [Finding("extensions", f"1 compiled extension in {cache}")]


def test_builds_of_another_environment(root: Path, cache: Path, site: Path, tmp_path: Path) -> None:
    planting.torch(site)
    other = tmp_path / "other"
    other.mkdir()
    for name in ("cpu_adam", "fused_adam"):
        built_with(cache, name, other)
    finding = planting.only(look(root, cache), "mixed cache")
    assert (finding.state, finding.found) == ("problem", f"cpu_adam, fused_adam built for {other}")
    assert finding.fix == f'export TORCH_EXTENSIONS_DIR="$HOME/.cache/torch_extensions-{Path(sys.prefix).name}"'


def test_builds_of_an_environment_that_is_gone(root: Path, cache: Path, site: Path, tmp_path: Path) -> None:
    planting.torch(site)
    built_with(cache, "fused_adam", tmp_path / "gone")
    finding = planting.only(look(root, cache), "old builds")
    assert (finding.state, finding.fix) == ("note", f"rm -r {shlex.quote(str(cache / 'fused_adam'))}")


def test_the_build_files_are_torchs_own(cache: Path) -> None:
    """Control: what torch writes today is what is read."""
    cpp_extension = pytest.importorskip("torch.utils.cpp_extension")
    import torch

    headers = [header for header in cpp_extension.include_paths() if header.endswith("torch/include")]
    planting.write(cache, {"x/build.ninja": "cflags = " + " ".join(f"-isystem {header}" for header in headers)})
    assert extension_cache._headers(cache / "x/build.ninja") == {str(Path(torch.__file__).resolve().parents[1])}


def test_the_place_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cpp_extension = pytest.importorskip("torch.utils.cpp_extension")
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere/caches")
    made = []
    monkeypatch.setattr(os, "makedirs", lambda path, **options: made.append(path))
    theirs = cpp_extension._get_build_directory("op", verbose=False)
    assert extension_cache.extension_cache(planting.Machine()) == Path(theirs).parent
    assert made == [theirs], "torch made its folder, and we none"


def test_without_torch_the_place_is_not_known(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsaccum.doctor.torch_build.package_folder", lambda name: None)
    assert list(check_extension_cache(planting.machine(root))) == []


# --- the compiler ---


def compilers(root: Path, **environment: str) -> Finding:
    return planting.only(check_compiler(planting.machine(root, environment)), "C++ compiler")


def test_a_compiler_that_works(root: Path) -> None:
    planting.command(root, "c++", "echo 'c++ 12.2.0'; echo more")
    assert compilers(root) == Finding("C++ compiler", "c++ 12.2.0")


def test_no_compiler_is_a_note(root: Path) -> None:
    finding = compilers(root)
    assert (finding.state, finding.found, finding.fix) == ("note", "none", "sudo apt-get install g++")
    assert "FusedAdam" in finding.consequence


def test_a_compiler_under_another_name(root: Path) -> None:
    planting.command(root, "g++", "echo 'g++ 12.2.0'")
    assert compilers(root).fix == "export CXX=g++"
    assert compilers(root, CXX="g++") == Finding("C++ compiler", "g++ 12.2.0")
    assert compilers(root, CXX="icpx").fix == "unset CXX"


def test_a_compiler_that_hangs_or_fails(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_VERSION_S", 0.2)
    planting.command(root, "c++", "exec /bin/sleep 60")
    assert compilers(root).consequence.endswith("no answer within 0.2 s")
    planting.command(root, "c++", "echo 'no licence' >&2; exit 1")
    assert (compilers(root).state, compilers(root).consequence[-10:]) == ("note", "no licence")


def test_ninja(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.sysconfig, "get_path", lambda name: str(tmp_path / "scripts"))
    finding = planting.only(check_compiler(planting.machine(root)), "ninja")
    assert (finding.state, finding.fix.endswith("-m pip install ninja")) == ("note", True)
    planting.command(tmp_path, "ninja", "")
    (tmp_path / "bin").rename(tmp_path / "scripts")
    finding = planting.only(check_compiler(planting.machine(root)), "ninja")
    assert finding.fix == f'export PATH="{tmp_path}/scripts:$PATH"'
    planting.command(root, "ninja", "")
    assert "ninja" not in planting.states(check_compiler(planting.machine(root)))


def test_nvcc_is_looked_for_where_there_is_a_gpu(root: Path, site: Path) -> None:
    planting.torch(site, cuda="13.0")
    assert "nvcc" not in planting.states(check_compiler(planting.machine(root)))
    planting.write(root, {"dev/nvidia0": ""})
    assert planting.only(check_compiler(planting.machine(root)), "nvcc").state == "note"
    planting.command(root / "usr/local/cuda", "nvcc", "")
    assert "nvcc" not in planting.states(check_compiler(planting.machine(root)))
