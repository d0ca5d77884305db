"""Gradients of a window and of its micro-batches, each tensor reduced to one small triangle that keeps all geometry.

With A_t = [g_1 ... g_p, extra ..., G] restricted to tensor t, [elements, m], the QR factorisation A_t = Q_t R_t gives

    ||A_t c|| = ||R_t c||    and    <A_t a, A_t b> = <R_t a, R_t b>    for any coefficients

so the few thousand numbers of all R_t [m, m] answer every later question: weights with or without a tensor, residuals,
norms of partial sums. The Gram matrix A_t^T A_t = R_t^T R_t would do so too, but it squares the condition number, and a
residual found from it drowns in sqrt(2^-53) = 1e-8, where float32's own residual lies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dsaccum.verification.comparison.sketch import Vectors

ROWS = 2048
"""Elements factorised at a time: with 17 columns of float64 they stay in the cache."""


class Factors:
    """R_t of every tensor; building it is the only pass over the gradients.

    Args:
        gradient: G, what arrived, by parameter name.
        columns: g_i, each micro-batch's own gradient, [p].
        extra: further vectors that G may hold a multiple of, [e].

    Attributes:
        names: of the tensors.
        elements: of each tensor, [T].
        triangles: R_t, float64 [T, m, m] with m = p + e + 1. A vector that isn't finite in a tensor has NaN there.
        num_columns: p.
        num_extra: e.

    Raises:
        ValueError: one name with different numbers of elements.
    """

    def __init__(self, gradient: Vectors, columns: Sequence[Vectors], extra: Sequence[Vectors] = ()) -> None:
        vectors = [*columns, *extra, gradient]
        self.names = list(dict.fromkeys(name for vector in vectors for name in vector))
        self.num_columns, self.num_extra = len(columns), len(extra)
        self.elements: list[int] = []
        triangles = []
        for name in self.names:
            tensors = _flat([vector.get(name) for vector in vectors], name)
            self.elements.append(tensors[0].numel())
            triangles.append(_triangle(tensors))
        size = len(vectors)
        self.triangles = torch.stack(triangles) if triangles else torch.zeros(0, size, size, dtype=torch.float64)

    def norm(self, weights: Sequence[float]) -> float:
        """||sum_i w_i g_i|| over all tensors, for ``weights`` [p]; NaN where a micro-batch's gradient isn't finite."""
        return float(self._image(weights).norm())

    def inner(self, weights_a: Sequence[float], weights_b: Sequence[float]) -> float:
        """Inner product of sum_i a_i g_i and sum_i b_i g_i over all tensors; each [p]."""
        return float((self._image(weights_a) * self._image(weights_b)).sum())

    def not_finite(self, tensors: Sequence[int]) -> str | None:
        """Says which vector holds NaN or infinity in one of ``tensors`` (their indices); None if all are finite."""
        broken = self.triangles[list(tensors)].isnan().any(dim=1)  # [tensors, m]
        for vector in range(broken.shape[1] - 1, -1, -1):  # the gradient first: it is what arrived
            where = [self.names[t] for t, bad in zip(tensors, broken[:, vector].tolist(), strict=True) if bad]
            if where:
                return f"{self._called(vector)} isn't finite in {len(where)} tensors: {', '.join(where[:3])}"
        return None

    def _image(self, weights: Sequence[float]) -> Tensor:
        """R_t c of every tensor, [T, m]."""
        if len(weights) != self.num_columns:
            raise ValueError(f"{len(weights)} weights for {self.num_columns} micro-batches")
        coefficients = torch.tensor(weights, dtype=torch.float64)
        return self.triangles[:, :, : self.num_columns] @ coefficients

    def _called(self, vector: int) -> str:
        if vector < self.num_columns:
            return f"the gradient of micro-batch {vector + 1}"
        return "the gradient" if vector == self.num_columns + self.num_extra else "an extra vector"


def _flat(tensors: Sequence[Tensor | None], name: str) -> list[Tensor]:
    """Each as a vector on the CPU; None as zeros."""
    sizes = {tensor.numel() for tensor in tensors if tensor is not None} or {0}
    if len(sizes) > 1:
        raise ValueError(f"{name} has different numbers of elements: {sorted(sizes)}")
    size = sizes.pop()
    return [torch.zeros(size) if t is None else t.detach().reshape(-1).cpu() for t in tensors]


def _triangle(tensors: Sequence[Tensor]) -> Tensor:
    """R [m, m] of the vectors, float64, rows upon rows: R of [A; B] is R of [R of A; B]."""
    finite = [bool(tensor.isfinite().all()) for tensor in tensors]
    size = len(tensors)
    triangle = torch.zeros(size, size, dtype=torch.float64)
    for rows in _rows([t if good else torch.zeros_like(t) for t, good in zip(tensors, finite, strict=True)]):
        triangle = torch.linalg.qr(torch.cat([triangle, rows]), mode="r").R
    triangle[:, [not good for good in finite]] = math.nan
    return triangle


def _rows(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The matrix with ``tensors`` as columns, float64, ``ROWS`` rows at a time."""
    for start in range(0, tensors[0].numel(), ROWS):
        yield torch.stack([tensor[start : start + ROWS].double() for tensor in tensors]).T
