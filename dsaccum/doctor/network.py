"""How ranks find each other: this machine's name, its loopback, and interfaces that the environment names."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator

from dsaccum.doctor.finding import Finding
from dsaccum.doctor.machine import Machine, in_background

_LOOPBACK = "127.0.0.1"
_SLOW_S, _LOOK_UP_S = 2.0, 8.0
_TELLING = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_GLOO_", "TORCH_DISTRIBUTED_")
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def check_host_name(machine: Machine) -> Iterator[Finding]:
    """Whether this machine's name leads to this machine, and quickly: every rank looks it up."""
    name = socket.gethostname()
    fix = f"echo '127.0.1.1 {name}' | sudo tee -a /etc/hosts"
    began = time.monotonic()
    try:
        address = address_of(name)
    except TimeoutError:
        consequence = "every rank waits for that when it starts"
        yield Finding("host name", f"{name}: no answer within {_LOOK_UP_S:g} s", "problem", consequence, fix)
        return
    except OSError as error:
        consequence = "ranks on this machine use the loopback; ranks on several machines hang"
        yield Finding("host name", f"{name} has no address ({error.strerror or error})", "note", consequence, fix)
        return
    seconds = time.monotonic() - began
    if seconds > _SLOW_S:
        consequence = "every rank waits for that when it starts"
        yield Finding("host name", f"{name} is {address}, after {seconds:.0f} s", "note", consequence, fix)
    elif not is_local(address):
        consequence = "no interface here has this address: ranks on several machines hang"
        yield Finding("host name", f"{name} is {address}", "note", consequence, fix)
    else:
        yield Finding("host name", f"{name} is {address}")


def check_loopback(machine: Machine) -> Iterator[Finding]:
    """Ranks on one machine meet there."""
    try:
        socket.create_server((_LOOPBACK, 0)).close()
    except OSError as error:
        found = f"{_LOOPBACK} cannot be used ({error.strerror or error})"
        yield Finding("loopback", found, "problem", "ranks on this machine cannot meet", "sudo ip link set lo up")
    else:
        yield Finding("loopback", f"{_LOOPBACK} can be used")


def check_interfaces(machine: Machine) -> Iterator[Finding]:
    """Variables that change how ranks talk, and whether the interfaces that they name exist."""
    given = {name: value for name, value in sorted(machine.environment.items()) if name.startswith(_TELLING) and value}
    if not given:
        yield Finding("communication", "no NCCL, gloo or torch.distributed variable is set")
        return
    yield Finding("communication", ", ".join(f"{name}={value}" for name, value in given.items()))
    here = _interfaces()
    for name in _INTERFACES:
        missing = name in given and _names_none(given[name], here, by_prefix=name.startswith("NCCL"))
        if missing and (name.startswith("GLOO") or machine.gpu_devices):
            found = f"{name}={given[name]}; there is {', '.join(sorted(here))}"
            yield Finding("interface", found, "problem", "ranks cannot start: no such interface", f"unset {name}")
        elif missing:
            found = f"{name}={given[name]} names no interface of this machine"
            yield Finding("interface", found, "note", "NCCL on GPUs could not start", f"unset {name}")


def address_of(name: str) -> str:
    """The IPv4 address of a host.

    Raises:
        TimeoutError: nobody answers in time.
        OSError: it has none.
    """
    return in_background(lambda: socket.gethostbyname(name)).result(timeout=_LOOK_UP_S)


def is_local(address: str) -> bool:
    """Whether a socket can be bound to an address: the machine's own ones only."""
    try:
        socket.create_server((address, 0)).close()
    except OSError:
        return False
    return True


def is_taken(port: int) -> bool:
    """Whether somebody listens there already."""
    try:
        socket.create_server((_LOOPBACK, port)).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def _interfaces() -> set[str]:
    return {name for _, name in socket.if_nameindex()}


def _names_none(written: str, here: set[str], *, by_prefix: bool) -> bool:
    """Gloo takes names; NCCL takes prefixes, names after ``=``, and exclusions after ``^``."""
    if by_prefix and written.startswith("^"):
        return False
    exact = not by_prefix or written.startswith("=")
    wanted = [each.strip() for each in written.removeprefix("=").split(",") if each.strip()]
    if exact and not by_prefix:  # gloo needs them all
        return any(each not in here for each in wanted)
    return not any(name == each if exact else name.startswith(each) for each in wanted for name in here)
