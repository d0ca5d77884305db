"""The machine, for a record."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch


def hardware() -> dict[str, Any]:
    """What this was run on, for a record."""
    on_gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "devices": torch.cuda.device_count() if on_gpu else 0,
        "processor": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.system(),
    }
