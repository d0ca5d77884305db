"""Cores, threads, memory and shared memory: as control groups, containers and the environment limit them.

Run: pytest tests/doctor/test_cores_and_memory.py -n 0. Not covered: real containers.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from dsaccum.doctor.control_groups import cpu_quota, memory_left
from dsaccum.doctor.cores import check_cores
from dsaccum.doctor.finding import Finding
from dsaccum.doctor.machine import Machine
from dsaccum.doctor.memory import check_memory, check_shared_memory
from tests.doctor import planting

GIB = 1 << 30
V2, V1 = "0::/user/mine\n", "4:memory:/mine\n2:cpu,cpuacct:/mine\n1:name=systemd:/\n"


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    def set_to(gibibytes: float) -> None:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=int(gibibytes * GIB)))

    return set_to


def threads(root: Path, **environment: str) -> Finding:
    return planting.only(check_cores(planting.machine(root, environment)), "threads")


# --- cores ---


@pytest.mark.usefixtures("eight_cores")
def test_cores_without_a_limit(bare: Machine) -> None:
    findings = list(check_cores(bare))
    assert planting.only(findings, "cores").found == "8"
    assert planting.states(findings) == {"cores": "ok", "threads": "ok"}


def test_cores_by_affinity(bare: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert planting.only(check_cores(bare), "cores").found == "1 of 64, by affinity"


@pytest.mark.usefixtures("eight_cores")
def test_threads_that_do_not_fit_a_quota(root: Path) -> None:
    planting.write(root, {"proc/self/cgroup": V2, "sys/fs/cgroup/user/mine/cpu.max": "250000 100000\n"})
    assert planting.only(check_cores(planting.machine(root)), "cores").found == "8; time for 2.5, by control group"
    finding = threads(root)
    assert (finding.state, finding.fix) == ("note", "export OMP_NUM_THREADS=1")
    assert "2 ranks of 4 threads" in finding.consequence
    assert threads(root, OMP_NUM_THREADS="1").state == "ok"


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("written", "state"), [("4", "ok"), ("4,2", "ok"), ("8", "note"), ("all", "note"), ("0", "note")]
)
def test_threads_of_the_environment(written: str, state: str, root: Path) -> None:
    finding = threads(root, OMP_NUM_THREADS=written)
    assert (finding.state, finding.found) == (state, f"OMP_NUM_THREADS={written}")
    assert finding.fix == ("" if state == "ok" else "export OMP_NUM_THREADS=4")


def test_one_thread_a_rank_always_fits(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    planting.write(root, {"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": "50000 100000\n"})
    assert threads(root, OMP_NUM_THREADS="1").state == "ok"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"sys/fs/cgroup/user/mine/cpu.max": "max 100000\n"}, None),
        ({"sys/fs/cgroup/user/mine/cpu.max": "200000 100000\n"}, 2.0),
        ({"sys/fs/cgroup/user/mine/cpu.max": "max 100000\n", "sys/fs/cgroup/user/cpu.max": "150000 100000\n"}, 1.5),
        ({"sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4.0),
        ({"sys/fs/cgroup/cpu,cpuacct/mine/cpu.cfs_quota_us": "-1\n",
          "sys/fs/cgroup/cpu,cpuacct/mine/cpu.cfs_period_us": "100000\n"}, None),
        ({"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
          "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 0.5),
    ],
)  # fmt: skip
def test_quotas(files: dict[str, str], quota: float | None, root: Path) -> None:
    planting.write(root, {"proc/self/cgroup": V2 + V1, **files})
    assert cpu_quota(planting.machine(root)) == quota


def test_a_path_of_the_host_leads_nowhere(root: Path) -> None:
    planting.write(root, {"proc/self/cgroup": "0::/../../elsewhere\n", "etc/cpu.max": "1 1\n"})
    assert cpu_quota(planting.machine(root)) is None


# --- memory ---


def test_memory_that_suffices(bare: Machine, available: Callable[[float], None]) -> None:
    available(7.5)
    assert list(check_memory(bare)) == [Finding("memory", "7.5 GiB available")]


@pytest.mark.parametrize(("gibibytes", "state"), [(1.9, "note"), (0.9, "problem")])
def test_memory_that_does_not(gibibytes: float, state: str, bare: Machine, available: Callable[[float], None]) -> None:
    available(gibibytes)
    [finding] = check_memory(bare)
    assert (finding.state, bool(finding.fix)) == (state, True)


def test_memory_that_a_container_limits(root: Path, available: Callable[[float], None]) -> None:
    available(64)
    folder = "sys/fs/cgroup/user/mine/memory"
    planting.write(root, {"proc/self/cgroup": V2, f"{folder}.max": f"{2 * GIB}\n",
                          f"{folder}.current": f"{3 * GIB // 2}\n",
                          f"{folder}.stat": f"anon 1\ninactive_file {GIB // 4}\n"})  # fmt: skip
    [finding] = check_memory(planting.machine(root))
    assert (finding.state, finding.found) == ("problem", "768.0 MiB available, by control group")
    planting.write(root, {f"{folder}.max": "max\n"})
    assert next(iter(check_memory(planting.machine(root)))).state == "ok"


def test_memory_limits_of_version_1(root: Path) -> None:
    folder = "sys/fs/cgroup/memory/mine/memory"
    planting.write(root, {"proc/self/cgroup": V1, f"{folder}.limit_in_bytes": f"{GIB}\n",
                          f"{folder}.usage_in_bytes": "7\n",
                          "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                          "sys/fs/cgroup/memory/memory.usage_in_bytes": "9\n"})  # fmt: skip
    assert memory_left(planting.machine(root)) == GIB - 7


# --- shared memory ---


@pytest.mark.parametrize(
    ("free", "gpus", "container", "state", "fix"),
    [
        (GIB, 8, True, "ok", ""),
        (64 << 20, 0, True, "note", "docker run --shm-size=1g ..."),
        (64 << 20, 1, False, "note", "sudo mount -o remount,size=1G /dev/shm"),
        (64 << 20, 2, True, "problem", "docker run --shm-size=1g ..."),
    ],
)
def test_shared_memory(
    free: int, gpus: int, container: bool, state: str, fix: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free, total=2 * free))
    planting.write(root, {f"dev/nvidia{number}": "" for number in range(gpus)} | {"dev/nvidiactl": ""})
    if container:
        planting.write(root, {".dockerenv": ""})
    [finding] = check_shared_memory(planting.machine(root))
    assert (finding.state, finding.fix.partition("  #")[0]) == (state, fix)
    if state == "problem":
        [finding] = check_shared_memory(planting.machine(root, {"DS_ACCELERATOR": "cpu"}))
        assert finding.state == "note", "ranks do not use the GPUs"


def test_no_shared_memory_at_all(bare: Machine) -> None:
    [finding] = check_shared_memory(bare)
    assert (finding.state, finding.found) == ("note", "there is no /dev/shm")
