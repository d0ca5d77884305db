"""What a DeepSpeed engine changes for its whole process, and how that is undone before the next engine."""

from __future__ import annotations

import sys

import torch


def forget_earlier_engines() -> None:
    """Let later engines compute as in a process of their own.

    An engine leaves behind that autocast is on; and, from ZeRO 3 on, a linear layer that rounds the product before it
    adds the bias.
    """
    torch.nn.functional.linear = torch._C._nn.linear  # what torch itself calls so, whatever it is called now
    module = sys.modules.get("deepspeed.runtime.torch_autocast")
    if module is not None:
        module.TORCH_AUTOCAST_INITIALIZED = False  # type: ignore[attr-defined]
