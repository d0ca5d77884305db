"""All checks, and one look at the machine with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from dsaccum.doctor.compiler import check_compiler
from dsaccum.doctor.cores import check_cores
from dsaccum.doctor.disk import check_disk, check_temporary_folder
from dsaccum.doctor.extension_cache import check_extension_cache
from dsaccum.doctor.finding import Finding
from dsaccum.doctor.gpus import check_gpus
from dsaccum.doctor.known_versions import check_deepspeed
from dsaccum.doctor.launch_variables import check_launch_variables
from dsaccum.doctor.machine import Machine, in_background
from dsaccum.doctor.memory import check_memory, check_shared_memory
from dsaccum.doctor.network import check_host_name, check_interfaces, check_loopback
from dsaccum.doctor.packages import check_packages, check_python

LIMIT_S = 45.0
"""For all checks together; the slowest asks a torch that has to be loaded first."""


@dataclass(frozen=True)
class Check:
    """A look at one place.

    Args:
        name: for the case that there is no other answer.
        look: gives the findings.
    """

    name: str
    look: Callable[[Machine], Iterable[Finding]]


CHECKS = (
    Check("python", check_python),
    Check("packages", check_packages),
    Check("deepspeed", check_deepspeed),
    Check("GPUs", check_gpus),
    Check("cores", check_cores),
    Check("memory", check_memory),
    Check("shared memory", check_shared_memory),
    Check("C++ compiler", check_compiler),
    Check("extensions", check_extension_cache),
    Check("host name", check_host_name),
    Check("loopback", check_loopback),
    Check("communication", check_interfaces),
    Check("launch", check_launch_variables),
    Check("temporary files", check_temporary_folder),
    Check("disk", check_disk),
)


def examine(machine: Machine, checks: Sequence[Check] = CHECKS, limit_s: float = LIMIT_S) -> list[Finding]:
    """Make all checks side by side; a check that fails or hangs is a finding too.

    Args:
        machine: where to look.
        checks: what to look at.
        limit_s: how long to wait for all of them.
    """
    until = time.monotonic() + limit_s
    begun = [(check, in_background(partial(_look, check, machine))) for check in checks]
    return [finding for check, answer in begun for finding in _answer(check, answer, until)]


def _look(check: Check, machine: Machine) -> list[Finding]:
    return list(check.look(machine))


def _answer(check: Check, answer: Future[list[Finding]], until: float) -> list[Finding]:
    try:
        return answer.result(timeout=max(until - time.monotonic(), 0))
    except TimeoutError:
        return [Finding(check.name, "no answer in time", "note", "whoever looks there waits too")]
    except Exception as error:  # a machine that nobody foresaw: the other findings still count
        return [Finding(check.name, "could not be looked at", "note", f"{type(error).__name__}: {error}")]
