"""How fp32 matrix products and convolutions are computed: in full, or rounded to TF32 or bf16 as a user's settings ask.

Rounded products move a gradient by 1e-3 and more, in which much could hide. They say nothing of accumulation: both
sides are verified with full ones, and what the run's own settings cost is measured beside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch

_OPERATIONS: Final = [
    *(("cuda", "matmul"), ("cudnn", "conv"), ("cudnn", "rnn")),
    *(("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn")),
]
_ROUNDED: Final = ("tf32", "bf16")
_LEGACY: Final = "float32_matmul_precision", "cudnn.allow_tf32"


@contextmanager
def full_products() -> Iterator[Mapping[str, Any]]:
    """Inside, fp32 products keep all their bits; yields the settings that are put back afterwards."""
    full = dict.fromkeys(_read(), "ieee") if _by_operation() else {_LEGACY[0]: "highest", _LEGACY[1]: False}
    with _settings(full) as found:
        yield found


@contextmanager
def products_as(found: Mapping[str, Any]) -> Iterator[None]:
    """Inside, they are computed as these settings say."""
    with _settings(found):
        yield


def rounds(found: Mapping[str, Any]) -> bool:
    """Whether these settings may round a product, on some device."""
    return any(value in _ROUNDED or value in ("high", "medium", True) for value in found.values())


@contextmanager
def _settings(wanted: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    found = _read()
    _write(wanted)
    try:
        yield found
    finally:
        _write(found)


def _by_operation() -> bool:
    """Whether torch (2.9 and later) has a setting for each kind of operation."""
    return hasattr(torch.backends.cuda.matmul, "fp32_precision")


def _read() -> dict[str, Any]:
    if _by_operation():
        return {f"{backend}.{name}": _operation(backend, name).fp32_precision for backend, name in _OPERATIONS}
    return dict(zip(_LEGACY, (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32), strict=True))


def _write(settings: Mapping[str, Any]) -> None:
    if not _by_operation():
        torch.set_float32_matmul_precision(settings[_LEGACY[0]])
        torch.backends.cudnn.allow_tf32 = settings[_LEGACY[1]]
        return
    for backend, name in _OPERATIONS:
        _operation(backend, name).fp32_precision = settings[f"{backend}.{name}"]


def _operation(backend: str, name: str) -> Any:
    return getattr(getattr(torch.backends, backend), name)
