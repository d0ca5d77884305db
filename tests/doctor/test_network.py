"""How ranks meet: names, loopback, interfaces, and variables that a launcher left behind.

Run: pytest tests/doctor/test_network.py -n 0. Names are looked up by a stub; not covered: several machines.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from dsaccum.doctor import network
from dsaccum.doctor.finding import Finding
from dsaccum.doctor.launch_variables import check_launch_variables
from dsaccum.doctor.machine import Machine
from dsaccum.doctor.network import check_host_name, check_interfaces, check_loopback
from tests.doctor import planting

NOT_OURS = "192.0.2.1"
"""For documentation only, so nobody has it."""


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"here": "127.0.0.1", "there": NOT_OURS, "127.0.0.1": "127.0.0.1", NOT_OURS: NOT_OURS}

    def look_up(name: str) -> str:
        if name == "asleep":
            time.sleep(1)
        if name not in known:
            raise socket.gaierror(-2, "Name or service not known")
        return known[name]

    monkeypatch.setattr(socket, "gethostbyname", look_up)
    monkeypatch.setattr(network, "_LOOK_UP_S", 0.1)


def host_name(name: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Finding:
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    [finding] = check_host_name(machine)
    return finding


# --- the machine's name ---


def test_a_name_that_leads_here(bare: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_name("here", bare, monkeypatch) == Finding("host name", "here is 127.0.0.1")


@pytest.mark.parametrize(("name", "said"), [("nowhere", "no address (Name or service not known)"), ("there", NOT_OURS)])
def test_a_name_that_does_not(name: str, said: str, bare: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = host_name(name, bare, monkeypatch)
    assert (finding.state, said in finding.found) == ("note", True)
    assert finding.fix == f"echo '127.0.1.1 {name}' | sudo tee -a /etc/hosts"


def test_a_look_up_that_takes_for_ever(bare: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    finding = host_name("asleep", bare, monkeypatch)
    assert (finding.state, finding.found) == ("problem", "asleep: no answer within 0.1 s")
    assert time.monotonic() - began < 0.9, "it is not waited for"


def test_a_slow_look_up(bare: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_SLOW_S", -1.0)
    assert host_name("here", bare, monkeypatch).state == "note"


def test_the_loopback(bare: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [each.state for each in check_loopback(bare)] == ["ok"]
    monkeypatch.setattr(network, "_LOOPBACK", NOT_OURS)
    [finding] = check_loopback(bare)
    assert (finding.state, finding.fix) == ("problem", "sudo ip link set lo up")


# --- interfaces ---


@pytest.fixture
def two_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])


@pytest.mark.usefixtures("two_interfaces")
@pytest.mark.parametrize(
    ("variable", "value", "state"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", "ok"),
        ("GLOO_SOCKET_IFNAME", "eth0,lo", "ok"),
        ("GLOO_SOCKET_IFNAME", "eth", "problem"),
        ("GLOO_SOCKET_IFNAME", "eth0,ib0", "problem"),
        ("NCCL_SOCKET_IFNAME", "eth", "ok"),
        ("NCCL_SOCKET_IFNAME", "ib,eth", "ok"),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", "ok"),
        ("NCCL_SOCKET_IFNAME", "=eth", "problem"),
        ("NCCL_SOCKET_IFNAME", "ib", "problem"),
    ],
)
def test_interfaces(variable: str, value: str, state: str, root: Path) -> None:
    planting.write(root, {"dev/nvidia0": ""})
    findings = list(check_interfaces(planting.machine(root, {variable: value})))
    assert findings[0] == Finding("communication", f"{variable}={value}")
    assert [(each.state, each.fix) for each in findings[1:]] == (
        [] if state == "ok" else [("problem", f"unset {variable}")]
    )


@pytest.mark.usefixtures("two_interfaces")
def test_what_nccl_would_miss_is_a_note_without_gpus(root: Path) -> None:
    findings = check_interfaces(planting.machine(root, {"NCCL_SOCKET_IFNAME": "ib"}))
    assert planting.only(findings, "interface").state == "note"


def test_no_variable_is_set(bare: Machine) -> None:
    [finding] = check_interfaces(bare)
    assert finding.state == "ok"


# --- what a launcher left behind ---


def launch(root: Path, **environment: str) -> Finding:
    [finding] = check_launch_variables(planting.machine(root, environment))
    return finding


def test_an_ordinary_shell(root: Path) -> None:
    assert launch(root) == Finding("launch", "no variable of a launcher is set")


@pytest.mark.parametrize(
    ("left", "said"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "WORLD_SIZE=2 tells of other ranks"),
        ({"RANK": "1"}, "RANK=1 tells of other ranks"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK=x is no number"),
        ({"MASTER_ADDR": NOT_OURS}, f"MASTER_ADDR={NOT_OURS} is not this machine"),
        ({"MASTER_ADDR": "nowhere"}, "MASTER_ADDR=nowhere is not this machine"),
        ({"MASTER_ADDR": "asleep"}, "MASTER_ADDR=asleep is not this machine"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT=http is no port"),
    ],
)
def test_what_makes_one_process_wait_for_others(left: dict[str, str], said: str, root: Path) -> None:
    finding = launch(root, **left)
    assert (finding.state, finding.fix) == ("problem", f"unset {' '.join(left)}")
    assert finding.consequence.startswith(said)


def test_a_gpu_that_is_not_there(root: Path) -> None:
    assert launch(root, LOCAL_RANK="1").state == "note", "ranks on CPUs do not mind"
    planting.write(root, {"dev/nvidia0": ""})
    finding = launch(root, LOCAL_RANK="1")
    assert (finding.state, finding.fix) == ("problem", "unset LOCAL_RANK")


def test_what_does_not_is_a_note(root: Path) -> None:
    finding = launch(root, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="here")
    assert (finding.state, finding.fix) == ("note", "unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR")


def test_a_port_that_is_taken(root: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        finding = launch(root, MASTER_PORT=port)
    assert (finding.state, finding.consequence.startswith(f"port {port} is taken")) == ("problem", True)
