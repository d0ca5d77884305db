"""Versions of DeepSpeed that were measured, and what some of them get wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dsaccum.doctor.finding import Finding
from dsaccum.doctor.machine import Machine, python
from dsaccum.doctor.packages import installed_version


@dataclass(frozen=True)
class KnownFault:
    """What a range of versions gets wrong.

    Args:
        first: version that has it.
        last: version that has it.
        consequence: in one line.
        explained: where the documents say more.
    """

    first: str
    last: str
    consequence: str
    explained: str


KNOWN_FAULTS = (
    KnownFault(
        "0.18.3",
        "0.19.5",
        "a loop that calls the model with labels= gets every gradient divided by N twice, where the model returns loss "
        "and logits; dsaccum's own loop does not",
        "docs/deepspeed.md#divided-by-n-twice",
    ),
)
NEWEST_MEASURED = "0.19.8"


def check_deepspeed(machine: Machine) -> Iterator[Finding]:
    """The installed version against the table; nothing where it is not installed, which is said elsewhere."""
    found = installed_version("deepspeed")
    if found is None:
        return
    from packaging.version import Version

    installed = Version(Version(found).public)  # a local part, as of a build from source, sorts behind
    faults = [each for each in KNOWN_FAULTS if Version(each.first) <= installed <= Version(each.last)]
    for fault in faults:
        consequence = f"{fault.first} to {fault.last}: {fault.consequence} ({fault.explained})"
        fix = f"{python()} -m pip install deepspeed=={NEWEST_MEASURED}"
        yield Finding("deepspeed", f"{found} is known to be wrong", "problem", consequence, fix)
    if installed > Version(NEWEST_MEASURED):
        consequence = "what it does was not measured; this shows it"
        fix = "dsaccum verify --deepspeed ds_configs/accum4.json --loop hf-labels"
        yield Finding("deepspeed", f"{found} is newer than {NEWEST_MEASURED}", "note", consequence, fix)
    elif not faults:
        yield Finding("deepspeed", f"{found}: no fault is known that dsaccum does not mend or refuse")
