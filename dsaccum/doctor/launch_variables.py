"""What a launcher tells its ranks; left over in an ordinary shell, it makes one process wait for others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dsaccum.doctor.finding import Finding
from dsaccum.doctor.machine import Machine
from dsaccum.doctor.network import address_of, is_local, is_taken

_ONLY_RANK = {"RANK": "0", "WORLD_SIZE": "1"}
"""What a process that has no others may find."""
_LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE")
_NAMES = (*_ONLY_RANK, *_LOCAL, "MASTER_ADDR", "MASTER_PORT")


def check_launch_variables(machine: Machine) -> Iterator[Finding]:
    """Those that are set, and whether one process could start with them."""
    given = {name: machine.environment[name] for name in _NAMES if name in machine.environment}
    if not given:
        yield Finding("launch", "no variable of a launcher is set")
        return
    found, fix = ", ".join(f"{name}={value}" for name, value in given.items()), f"unset {' '.join(given)}"
    trouble = _trouble(given, machine.gpu_devices)
    if trouble:
        consequence = f"{trouble}: python launch/train.py cannot start; the deepspeed launcher sets its own"
        yield Finding("launch", found, "problem", consequence, fix)
    else:
        consequence = "left over from a launcher, perhaps; launchers and dsaccum verify set their own"
        yield Finding("launch", found, "note", consequence, fix)


def _trouble(given: Mapping[str, str], gpus: int) -> str:
    """Why a single process could not start; empty where it could."""
    for name, alone in _ONLY_RANK.items():
        if given.get(name, alone) != alone:
            return f"{name}={given[name]} tells of other ranks, and there are none"
    for name in _LOCAL:
        if not given.get(name, "0").isdigit():
            return f"{name}={given[name]} is no number"
    if gpus and int(given.get("LOCAL_RANK", 0)) >= gpus:
        return f"LOCAL_RANK={given['LOCAL_RANK']} asks for a GPU that is not there"
    return _trouble_of_place(given.get("MASTER_ADDR"), given.get("MASTER_PORT"))


def _trouble_of_place(address: str | None, port: str | None) -> str:
    if address is not None and not _is_here(address):
        return f"MASTER_ADDR={address} is not this machine"
    if port is not None and not (port.isdigit() and 0 < int(port) < 1 << 16):
        return f"MASTER_PORT={port} is no port"
    return f"port {port} is taken" if port is not None and is_taken(int(port)) else ""


def _is_here(host: str) -> bool:
    try:
        return is_local(address_of(host))
    except OSError:  # no such host, or no answer in time
        return False
