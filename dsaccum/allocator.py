"""How PyTorch says that it could not get the memory that it wanted."""

from __future__ import annotations

from typing import Final

import torch

_SAID: Final = ("defaultcpuallocator", "cublas_status_alloc_failed")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU or on a CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _SAID)
