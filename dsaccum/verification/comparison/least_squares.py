"""Least squares over triangular factors: which unknowns can be told apart, their values, and what stays unexplained."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dsaccum.verification.comparison.factors import Factors

WORST_CONDITION = 1e6
"""Above it weights are noise: an error of 2^-24 in a column can turn into 6 % of a weight."""
SAME_DIRECTION = 2 / WORST_CONDITION
"""Unit vectors no further apart are one: two at distance d have the condition number 2 / d."""
MOST_REWEIGHTINGS = 50


class System:
    """G = sum_i c_i v_i over some tensors, where the v_i are the micro-batches' gradients and the extra vectors.

    There is one unknown x_k for each group of micro-batches with the same direction and for each extra vector; none for
    a zero vector. Its vector is u_k = sum_i s_i v_i over the group, with signs s_i such that nothing cancels, scaled to
    norm 1: the condition number then speaks of directions, not of sizes.

    Args:
        tensors: indices of those to solve over; their vectors are finite.

    Attributes:
        groups: indices of each unknown's vectors.
        condition: condition number of the u_k; infinite without unknowns.
    """

    def __init__(self, factors: Factors, tensors: Sequence[int]) -> None:
        triangles = factors.triangles[list(tensors)]  # [T, m, m]
        vectors, self._targets = triangles[:, :, :-1], triangles[:, :, -1]
        self._norms = vectors.flatten(0, 1).norm(dim=0)  # [p + e]
        self.groups, signs = _groups(vectors.flatten(0, 1), factors.num_columns)
        mixing = torch.zeros(len(self._norms), len(self.groups), dtype=torch.float64)
        for k, group in enumerate(self.groups):
            mixing[group, k] = signs[group, group[0]]
        self._mixing = mixing / (vectors @ mixing).flatten(0, 1).norm(dim=0)  # c = mixing x
        self._units = vectors @ self._mixing  # u_k, [T, m, unknowns]
        self.condition = _condition_number(self._units.flatten(0, 1))

    def solve(self) -> Tensor:
        """Coefficients c [p + e], 0 for zero vectors. By QR: off by the condition number times 2^-53."""
        return self._mixing @ self._solve(torch.ones(len(self._targets), dtype=torch.float64))

    def least_absolute(self) -> Tensor:
        """The c [p + e] that minimises sum_t ||G_t - sum_i c_i v_i,t||, by iteratively reweighted least squares.

        Each round minimises sum_t ||...||^2 / r_t, with r_t the norms that the last one left.
        """
        floor = 1e-9 * float(self._targets.norm()) or 1.0
        x = self._solve(torch.ones(len(self._targets), dtype=torch.float64))
        for _ in range(MOST_REWEIGHTINGS):
            left = (self._targets - self._units @ x).norm(dim=1)
            previous, x = x, self._solve(left.clamp(min=floor).rsqrt())
            if (x - previous).norm() <= 1e-9 * x.norm():
                break
        return self._mixing @ x

    def told(self, coefficients: Tensor) -> list[float | None]:
        """What ``coefficients`` say of each vector, [p + e]: a group's joint weight is shared equally.

        For v_i = s_i n_i u, c_i = s_i y: y sum n_i u is to be w sum s_i n_i u, so w = y sum n_i / sum s_i n_i. Nothing
        can be told where the vectors cancel.
        """
        values: list[float | None] = [None] * len(self._norms)
        for k, group in enumerate(self.groups):
            signs, sizes = self._mixing[group, k].sign(), self._norms[group]
            share = float(signs @ sizes / sizes.sum())
            if abs(share) > SAME_DIRECTION:
                for i, sign in zip(group, signs.tolist(), strict=True):
                    values[i] = float(coefficients[i]) * sign / share
        return values

    def _solve(self, importance: Tensor) -> Tensor:
        """x, with each tensor's equations times its ``importance`` [T]."""
        rows = (importance[:, None, None] * self._units).flatten(0, 1)
        targets = (importance[:, None] * self._targets).reshape(-1, 1)
        return torch.linalg.lstsq(rows, targets, driver="gels").solution[:, 0]


class Sight:
    """The gradient beside what coefficients predict for it.

    Args:
        coefficients: c [p + e].
        tensors: indices of those to look at; None for all.

    Attributes:
        targets: G_t as R_t has it, [T, m].
        predicted: P_t = sum_i c_i v_i,t, likewise.
        left_over: ||G_t - P_t||, [T]; infinite where something isn't finite.
        sizes: S_t = sum_i |c_i| ||v_i,t||, [T].
        size: S = sum_i |c_i| ||v_i||.
    """

    def __init__(self, factors: Factors, coefficients: Tensor, tensors: Sequence[int] | None = None) -> None:
        triangles = factors.triangles if tensors is None else factors.triangles[list(tensors)]
        used = coefficients.nonzero().flatten()  # 0 times NaN isn't 0
        vectors, c = triangles[:, :, used], coefficients[used]
        self.targets, self.predicted = triangles[:, :, -1], vectors @ c
        self.left_over = (self.targets - self.predicted).norm(dim=1).nan_to_num(nan=math.inf)
        finite = vectors.nan_to_num()
        self.sizes = finite.norm(dim=1) @ c.abs()
        self.size = float(finite.flatten(0, 1).norm(dim=0) @ c.abs())


def quotient(part: float, whole: float) -> float:
    """A part of a whole: nothing of nothing is 0, something of nothing infinite."""
    return part / whole if whole else (math.inf if part else 0.0)


def _groups(vectors: Tensor, num_columns: int) -> tuple[list[list[int]], Tensor]:
    """Non-zero ones among ``vectors`` [rows, p + e] by direction, and the sign of each against each, [p + e, p + e].

    Extra vectors are never merged: a weight shared with one would say that G holds some of it.
    """
    reduced = torch.linalg.qr(vectors, mode="r").R
    norms = reduced.norm(dim=0)
    units = reduced / norms  # NaN for zero vectors: close to nothing
    signs = (units.T @ units).sign()
    # Not from cosines: 1 - |cosine| = distance^2 / 2 has lost its digits where it matters.
    apart = (units[:, :, None] - signs * units[:, None, :]).norm(dim=0)
    groups: list[list[int]] = []
    for i in norms.nonzero().flatten().tolist():
        same = (group for group in groups if i < num_columns and apart[i, group[0]] <= SAME_DIRECTION)
        if group := next(same, None):
            group.append(i)
        else:
            groups.append([i])
    return groups, signs


def _condition_number(matrix: Tensor) -> float:
    if not matrix.numel():
        return math.inf
    singular = torch.linalg.svdvals(matrix)
    return float(singular.max() / singular.min()) if singular.min() > 0 else math.inf
