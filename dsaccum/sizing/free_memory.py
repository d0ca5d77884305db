"""How much of a device's memory a run may plan with."""

from __future__ import annotations

from typing import Final

import psutil
import torch

from dsaccum.doctor.control_groups import memory_left
from dsaccum.doctor.machine import Machine
from dsaccum.engine.process import Ranks

GPU_SHARE: Final = 0.9
"""The rest is for the allocator's gaps, NCCL's buffers and the libraries' workspaces, which no plan knows."""
CPU_SHARE: Final = 0.7
"""Less on a CPU: its allocator gives little back, and where memory runs out the system kills the process."""


def plannable_bytes(ranks: Ranks) -> int:
    """Of this rank: what is free now on its GPU, or its share of what this machine (or control group) has left."""
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        return int(free * GPU_SHARE)
    system, left = psutil.virtual_memory().available, memory_left(Machine())
    available = system if left is None else min(system, left)
    return int(available * CPU_SHARE) // ranks.local_world_size
