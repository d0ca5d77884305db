"""GPUs, whether the installed torch can use them, and whether it rounds fp32 products (TF32)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dsaccum.doctor.cores import MOST_RANKS, usable_cores
from dsaccum.doctor.finding import Finding
from dsaccum.doctor.machine import Answer, Machine, python
from dsaccum.doctor.torch_build import TorchBuild

_DRIVER_S, _TORCH_S = 10.0, 30.0
_NVIDIA, _DISPLAY = "0x10de", "0x03"  # vendor and class on the PCI bus
_ASK_DRIVER = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
_ASK_TORCH = """
import json, torch
print(json.dumps({
    "devices": torch.cuda.device_count() if torch.cuda.is_available() else 0,
    "matmul_tf32": torch.backends.cuda.matmul.allow_tf32, "cudnn_tf32": torch.backends.cudnn.allow_tf32,
}))
"""


@dataclass(frozen=True)
class Gpus:
    """What the machine has.

    Args:
        described: each as the driver does: name, memory, driver's version.
        complaint: why the driver's tool gives none, where it is there.
        cards: NVIDIA cards on the bus, with or without a driver.
    """

    described: tuple[str, ...]
    complaint: str
    cards: int

    def __str__(self) -> str:
        """``2 x NVIDIA H200, 143771 MiB, 570.86``: alike ones once."""
        kinds = dict.fromkeys(self.described)
        described = "; ".join(f"{self.described.count(kind)} x {kind}" for kind in kinds)
        return described or (f"{self.cards} x NVIDIA" if self.cards else "none")


def check_gpus(machine: Machine) -> Iterator[Finding]:
    """The GPUs against the build of torch, and how many ranks would be started."""
    gpus, build = find_gpus(machine), TorchBuild.installed()
    seen: dict[str, Any] = {}
    if machine.environment.get("DS_ACCELERATOR") == "cuda" and not gpus.described:
        consequence = f"DeepSpeed cannot start: {gpus.complaint or 'no driver shows a GPU'}"
        yield Finding("GPUs", "DS_ACCELERATOR=cuda, and no GPU", "problem", consequence, "unset DS_ACCELERATOR")
    elif machine.gpus_hidden_by and (gpus.described or gpus.cards):
        yield Finding("GPUs", f"{gpus}; not used: {machine.gpus_hidden_by}")
    elif build is None or build.hip:
        yield Finding("GPUs", f"{gpus}; {'there is no torch' if build is None else f'torch is {build.name}'}")
    elif not gpus.described:
        yield _without_driver(machine, gpus, build)
    elif build.cuda is None:
        yield _unused(gpus, build)
    else:
        answer = machine.answer(sys.executable, "-c", _ASK_TORCH, within_s=_TORCH_S)
        seen = _read(answer)
        yield _used(gpus, build, answer, seen)
    if seen.get("devices"):
        yield _tf32(machine, seen)
    yield _ranks(seen.get("devices", 0))


def find_gpus(machine: Machine) -> Gpus:
    """By the driver's own tool, and by the bus."""
    tool, cards = machine.program("nvidia-smi"), _cards(machine)
    if tool is None:
        return Gpus((), "", cards)
    answer = machine.answer(tool, *_ASK_DRIVER, within_s=_DRIVER_S)
    if answer.code != 0:
        return Gpus((), answer.complaint, cards)
    return Gpus(tuple(line.strip() for line in answer.output.splitlines() if line.strip()), "", cards)


def _without_driver(machine: Machine, gpus: Gpus, build: TorchBuild) -> Finding:
    """No GPU that can be used: fine, unless there is one after all."""
    if not gpus.cards and not gpus.complaint:
        if build.cuda is None:
            return Finding("GPUs", "none; ranks run on the CPU")
        consequence = "ranks run on the CPU; a CPU build would do, and is several GB smaller"
        return Finding("GPUs", f"none, and torch is {build.name}", "note", consequence)
    consequence = f"ranks run on the CPU{f': {gpus.complaint}' if gpus.complaint else ''}"
    if machine.in_container:
        fix = "docker run --gpus all ...  # in place of this container"
    else:
        fix = "sudo modprobe nvidia && nvidia-smi  # where there is no such module, install the NVIDIA driver"
    # A GPU that is not passed on to a container, or a CPU build of torch, may be meant.
    broken = build.cuda is not None and bool(gpus.complaint)
    return Finding("GPUs", f"{gpus}, without a driver that answers", "problem" if broken else "note", consequence, fix)


def _unused(gpus: Gpus, build: TorchBuild) -> Finding:
    consequence = (
        f"torch {build.version} is a CPU build, so ranks run on the CPU; DS_ACCELERATOR=cpu says that this is meant"
    )
    pip, version = f"{python()} -m pip", build.version.partition("+")[0]  # pip takes 2.6.0+cpu for 2.6.0
    fix = f"{pip} uninstall -y torch && {pip} install torch=={version}"
    return Finding("GPUs", str(gpus), "problem", consequence, fix)


def _used(gpus: Gpus, build: TorchBuild, answer: Answer, seen: dict[str, Any]) -> Finding:
    if not seen:
        consequence = f"torch {build.version} does not say what it sees: {answer.complaint}"
        return Finding("GPUs", str(gpus), "problem", consequence, f'{python()} -c "import torch; torch.cuda.init()"')
    if not seen["devices"]:
        reason = f": {answer.complaint}" if answer.error.strip() else ""
        consequence = f"torch {build.version}, {build.name}, cannot use them{reason}; ranks run on the CPU"
        fix = "nvidia-smi | grep 'CUDA Version'  # then install a torch that was built for this version or an older one"
        return Finding("GPUs", str(gpus), "problem", consequence, fix)
    return Finding("GPUs", f"{gpus}; torch is {build.name} and sees {seen['devices']}")


def _tf32(machine: Machine, seen: dict[str, Any]) -> Finding:
    forced = machine.environment.get("NVIDIA_TF32_OVERRIDE") == "1"
    matmul, convolutions = ("on" if forced or seen[key] else "off" for key in ("matmul_tf32", "cudnn_tf32"))
    found = f"{matmul} for matrix products, {convolutions} for convolutions"
    if matmul == "off":
        return Finding("TF32", found)
    consequence = "fp32 matrix products are rounded to 10 bits, about 1e-3, so fp32 runs agree to that only"
    return Finding("TF32", found, "note", consequence, "unset NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")


def _ranks(devices: int) -> Finding:
    verify = min(MOST_RANKS, devices or usable_cores())
    found = f"dsaccum verify starts {verify}, deepspeed {devices or 1}; --ranks W and --num_gpus W say otherwise"
    return Finding("ranks", found)


def _read(answer: Answer) -> dict[str, Any]:
    """What torch said; empty where it said nothing."""
    try:
        found = json.loads(answer.output.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return {}
    return found if answer.code == 0 and isinstance(found, dict) else {}


def _cards(machine: Machine) -> int:
    folder = machine.root / "sys/bus/pci/devices"
    places = [each.relative_to(machine.root) for each in folder.glob("*")]
    return sum(
        (machine.read(f"{place}/vendor") or "").strip() == _NVIDIA
        and (machine.read(f"{place}/class") or "").startswith(_DISPLAY)
        for place in places
    )
