"""Two machines on a virtual wire: network namespaces with addresses of their own, a rank in each.

Run: pytest -n 0 -m "slow or not slow" tests/endurance/test_two_machines.py, as root, with iproute2; skipped where that
is not allowed. What crosses the wire is counted by the kernel. Not covered: real switches, NCCL, ssh; in place of pdsh
stands a script that starts what DeepSpeed hands to pdsh, in the two namespaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.endurance.running import config, differences, metrics, steps_in, train
from tests.training.launching import TINY, TRAIN, environment

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]
SLOW = pytest.mark.slow
STEPS, EVERY, TIMEOUT_S = 12, 5, 10
FLAGS = [*TINY, "--steps", str(STEPS), "--set", f"run.checkpoint_every={EVERY}", "--preflight", "off",
         "--set", f"run.timeout_s={TIMEOUT_S}", "--micro-batch", "2"]  # fmt: skip
OVERHEAD = 0.05
"""Of TCP and Ethernet over what is sent: 66 bytes a packet of up to 64 KiB, and acknowledgements."""


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True, timeout=20).stdout


@dataclass(frozen=True)
class Wire:
    """Two hosts, ``<name>a`` with 10.77.0.1 and ``<name>b`` with 10.77.0.2."""

    name: str

    @property
    def hosts(self) -> tuple[str, str]:
        return f"{self.name}a", f"{self.name}b"

    def sent(self) -> int:
        """Bytes that the first host has put on the wire."""
        file = "/sys/class/net/w0/statistics/tx_bytes"
        return int(ip("netns", "exec", self.hosts[0], "cat", file))

    def pull(self) -> None:
        ip("-n", self.hosts[0], "link", "set", "w0", "down")

    def plug(self) -> None:
        ip("-n", self.hosts[0], "link", "set", "w0", "up")


@pytest.fixture
def wire() -> Iterator[Wire]:
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs root and iproute2: two hosts are two network namespaces")
    wire = Wire("ds" + uuid.uuid4().hex[:6])
    first, second = wire.hosts
    try:
        try:
            for host in wire.hosts:
                ip("netns", "add", host)
            ip("link", "add", "w0", "netns", first, "type", "veth", "peer", "name", "w0", "netns", second)
            for host, address in ((first, "10.77.0.1/24"), (second, "10.77.0.2/24")):
                ip("-n", host, "addr", "add", address, "dev", "w0")
                ip("-n", host, "link", "set", "w0", "up")
                ip("-n", host, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
        yield wire
    finally:
        for host in wire.hosts:
            subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False, timeout=20)


@contextlib.contextmanager
def on_both(
    wire: Wire, run: Path, *flags: str, flags_of_second: tuple[str, ...] = ()
) -> Iterator[list[subprocess.Popen]]:
    """A rank on each host, as torchrun on two machines would start them."""
    processes, logs = [], []
    for rank, host in enumerate(wire.hosts):
        place = {
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "LOCAL_SIZE": "1",
            "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29777", "GLOO_SOCKET_IFNAME": "w0",
        }  # fmt: skip
        words = [sys.executable, str(TRAIN), "--deepspeed", str(config()), *FLAGS, "--output-dir", run.name, *flags]
        words += flags_of_second if rank else ()
        logs.append((run.parent / f"{run.name}.{rank}.log").open("w"))
        processes.append(
            subprocess.Popen(
                ["ip", "netns", "exec", host, *words], cwd=run.parent, env=environment(**place), stdout=logs[-1],
                stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait(timeout=20)
        for log in logs:
            log.close()


def to_the_end(wire: Wire, run: Path, *flags: str) -> None:
    with on_both(wire, run, *flags) as processes:
        codes = [process.wait(timeout=180) for process in processes]
    assert codes == [0, 0], said(run)


def said(run: Path) -> str:
    return "".join((run.parent / f"{run.name}.{rank}.log").read_text() for rank in (0, 1))


def until(run: Path, steps: int) -> None:
    end = time.monotonic() + 120
    while steps_in(run) < steps:
        assert time.monotonic() < end, said(run)
        time.sleep(0.01)


@SLOW
def test_the_same_losses_as_on_one_machine(tmp_path: Path, wire: Wire) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert train(one, *FLAGS, ranks=2).code == 0
    to_the_end(wire, two)
    assert metrics(one) == metrics(two)
    assert differences(one, two, STEPS) == []


@SLOW
def test_bytes_on_the_wire_are_the_gradients_and_do_not_grow_with_n(tmp_path: Path, wire: Wire) -> None:
    # A model large enough that the 64 bytes of the exchange and the beats of the watchdog do not count.
    large = ["--set", "model.config={num_hidden_layers: 2, num_attention_heads: 2, hidden_size: 128}", "--steps", "14",
             "--set", "run.checkpoint_every=0"]  # fmt: skip
    measured = {}
    for steps in (1, 4, 16):
        run = tmp_path / f"n{steps}"
        with on_both(wire, run, *large, "--accum-steps", str(steps)) as processes:
            until(run, 3)
            before, first = wire.sent(), steps_in(run)
            until(run, 12)
            after, last = wire.sent(), steps_in(run)
            assert [process.wait(timeout=180) for process in processes] == [0, 0], said(run)
        measured[steps] = (after - before) / (last - first)
    parameters = json.loads((tmp_path / "n1/run.json").read_text())["parameters"]["trained"]
    print({steps: round(size) for steps, size in measured.items()}, 4 * parameters)
    for size in measured.values():  # W = 2: each rank sends 2 (W - 1) / W = 1 times the gradient
        assert size == pytest.approx(4 * parameters, rel=OVERHEAD)


@SLOW
def test_a_pulled_wire_ends_both_and_the_run_is_continued(tmp_path: Path, wire: Wire) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    long = ["--steps", "100"]
    to_the_end(wire, whole, *long)
    with on_both(wire, broken, *long) as processes:
        until(broken, 20)
        wire.pull()
        started = time.monotonic()
        codes = [process.wait(timeout=90) for process in processes]
        seconds = time.monotonic() - started
    print(f"{seconds:.0f} s")
    assert codes == [3, 3], said(broken)
    wire.plug()
    to_the_end(wire, broken, *long)
    assert differences(whole, broken, 100) == []


@SLOW
def test_another_config_on_one_machine_is_named(tmp_path: Path, wire: Wire) -> None:
    run = tmp_path / "run"
    with on_both(wire, run, flags_of_second=("--set", "run.seed=1")) as processes:
        codes = [process.wait(timeout=90) for process in processes]
    assert codes == [2, 2], said(run)
    assert "error: run.seed: rank 1 on " in said(run)
    assert not run.exists()


@SLOW
def test_a_machine_that_cannot_be_reached_is_named(tmp_path: Path, wire: Wire) -> None:
    run = tmp_path / "run"
    wire.pull()
    started = time.monotonic()
    with on_both(wire, run) as processes:
        codes = [process.wait(timeout=120) for process in processes]
    assert codes == [3, 3], said(run)
    assert time.monotonic() - started < 100
    assert "could not start" in said(run)


PDSH = """#!/bin/bash
# pdsh -S -f 1024 -w HOST,HOST COMMAND...: the command on each host, %n is the host's number; the largest code is ours.
while [ "$1" != -w ]; do shift; done
IFS=, read -ra hosts <<<"$2"; shift 2
number=0; running=()
for host in "${hosts[@]}"; do
  ip netns exec "$host" env -u PYTHONPATH bash -c "${*//%n/$number}" & running+=($!)
  number=$((number + 1))
done
code=0
for each in "${running[@]}"; do wait "$each"; one=$?; [ $one -gt $code ] && code=$one; done
exit $code
"""


def by_deepspeed(wire: Wire, run: Path, *launcher: str) -> list[str]:
    """``deepspeed --hostfile``, with one slot on each host."""
    hosts = run.parent / "hosts.txt"
    hosts.write_text("".join(f"{host} slots=1\n" for host in wire.hosts))
    deepspeed = str(Path(sys.executable).parent / "deepspeed")
    words = ["--hostfile", str(hosts), "--master_addr", "10.77.0.1", "--master_port", "29778", *launcher]
    return [deepspeed, *words, str(TRAIN), "--deepspeed", str(config()), *FLAGS, "--output-dir", run.name]


@SLOW
def test_started_by_deepspeed_on_each_machine(tmp_path: Path, wire: Wire) -> None:
    one, run = tmp_path / "one", tmp_path / "run"
    assert train(one, *FLAGS, ranks=2).code == 0
    env = environment(GLOO_SOCKET_IFNAME="w0")
    processes = []
    for number, host in enumerate(wire.hosts):
        words = by_deepspeed(wire, run, "--no_ssh", "--node_rank", str(number))
        with (tmp_path / f"run.{number}.log").open("w") as log:
            processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", host, *words], cwd=tmp_path, env=env, stdout=log, stderr=subprocess.STDOUT
                )
            )
    assert [process.wait(timeout=240) for process in processes] == [0, 0], said(run)
    assert metrics(one) == metrics(run)
    assert differences(one, run, STEPS) == []


@SLOW
def test_started_by_deepspeed_from_one_of_them(tmp_path: Path, wire: Wire) -> None:
    one, run, folder = tmp_path / "one", tmp_path / "run", tmp_path / "bin"
    assert train(one, *FLAGS, ranks=2).code == 0
    folder.mkdir()
    (folder / "pdsh").write_text(PDSH)
    (folder / "pdsh").chmod(0o755)
    env = environment(GLOO_SOCKET_IFNAME="w0", PATH=f"{folder}:{os.environ['PATH']}")
    words = by_deepspeed(wire, run, "--no_ssh_check")
    ended = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert metrics(one) == metrics(run)
    assert differences(one, run, STEPS) == []
