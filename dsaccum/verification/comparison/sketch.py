"""A gradient mapped to a few thousand numbers for each tensor, linearly, so that weights and residuals survive.

Whole gradients of every micro-batch of a large model don't fit. A CountSketch (Charikar, Chen, Farach-Colton 2002) adds
each element x_j, with a random sign s_j, to a random one of d buckets h_j:

    sketch(x)[b] = sum over j with h_j = b of s_j x_j

It is linear, so sketch(sum_i w_i g_i) = sum_i w_i sketch(g_i): the same weights solve the small problem. And as
E[s_j s_k] = 0 for j != k, inner products are unbiased: E<sketch(x), sketch(y)> = <x, y>.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

Vectors = Mapping[str, Tensor | None]
"""A gradient or its sketch: one tensor of any shape for each parameter's name. Missing and None are zeros."""

CHUNK = 1 << 16
"""Elements at a time: their 64-bit hashes stay in the cache, and are never stored for a whole tensor."""
MIXERS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""Odd factors of SplitMix64 (Steele, Lea, Flood 2014) as signed 64-bit numbers."""


class GradientSketch:
    """A linear map from a gradient by name to one vector for each tensor, the same on every rank and device.

    Args:
        shapes: of the parameters, by name.
        whole_limit: up to so many elements in all, every tensor is kept whole.
        dimension: d, a power of two. Tensors of at most d elements are kept whole, larger ones sketched to d numbers.

    Raises:
        ValueError: ``dimension`` is no power of two.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], *, whole_limit: int, dimension: int = 4096) -> None:
        if dimension < 1 or dimension & (dimension - 1):
            raise ValueError(f"the dimension of a sketch is a power of two, not {dimension}")
        self._shapes = dict(shapes)
        self._dimension = dimension
        self._all_whole = sum(shape.numel() for shape in shapes.values()) <= whole_limit

    def __call__(self, gradient: Vectors) -> dict[str, Tensor]:
        """A copy of ``gradient`` in small, on the CPU.

        Returns:
            for each tensor [its elements] where kept whole, in its own dtype but float32 at the least, which is exact
            and half of float64; [d] float64 where sketched. NaN and infinity stay not finite.

        Raises:
            ValueError: an unknown name, or another shape.
        """
        if unknown := sorted(gradient.keys() - self._shapes.keys()):
            raise ValueError(f"{len(unknown)} tensors have no known shape: {', '.join(unknown[:3])}")
        return {name: self._reduced(name, gradient.get(name)) for name in self._shapes}

    def _reduced(self, name: str, tensor: Tensor | None) -> Tensor:
        shape = self._shapes[name]
        whole = self._all_whole or shape.numel() <= self._dimension
        if tensor is None:
            return torch.zeros(shape.numel()) if whole else torch.zeros(self._dimension, dtype=torch.float64)
        if tensor.shape != shape:
            raise ValueError(f"{name} is {list(tensor.shape)}, not {list(shape)}")
        flat = tensor.detach().reshape(-1)
        if whole:
            return flat.to("cpu", torch.promote_types(flat.dtype, torch.float32), copy=True)
        return _count_sketch(flat, zlib.crc32(name.encode()) << 30, self._dimension).cpu()


def norms(vectors: Vectors) -> dict[str, float]:
    """L2 norm of each tensor, summed in float64.

    Of a sketch it is an estimate: its square is unbiased with relative deviation sqrt(2 / d), 2.2 % for d = 4,096.
    """
    return {name: 0.0 if tensor is None else float(tensor.double().norm()) for name, tensor in vectors.items()}


def _count_sketch(flat: Tensor, seed: int, dimension: int) -> Tensor:
    """Float64 [dimension] of ``flat`` [n], where it lies."""
    sketch = torch.zeros(dimension, dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), CHUNK):
        values = flat[start : start + CHUNK].double()
        hashes = _hashes(seed + start, values.numel(), flat.device)
        # The last operation was a product: its upper bits are the random ones. Bit 63 is the sign, 31 on the bucket.
        sketch.index_add_(0, (hashes >> 31) & (dimension - 1), torch.where(hashes < 0, -values, values))
    return sketch


def _hashes(first: int, count: int, device: torch.device) -> Tensor:
    """A random 64-bit number for each of the positions from ``first`` on: a counter, mixed; int64 [count].

    No generator's state, so that CPU and GPU agree, and any part of a tensor can be hashed by itself.
    """
    mixed = torch.arange(first, first + count, device=device)
    for factor in MIXERS[:-1]:
        mixed.mul_(factor)  # wraps at 2^64
        mixed.bitwise_xor_((mixed >> 32).bitwise_and_(0xFFFFFFFF))  # masked: >> drags the sign along
    return mixed.mul_(MIXERS[-1])
