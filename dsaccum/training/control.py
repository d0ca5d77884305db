"""The one control all-reduce of a window: 64 bytes that carry all that ranks must agree on besides gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

_MICRO_STEPS = 2**20
"""More than a window has, so that a rank and its micro-step make one number."""


@dataclass(frozen=True)
class WindowReport:
    """This rank's word on the window that it has finished.

    Attributes:
        loss_sum: summed token losses of its micro-batches.
        non_finite: micro-steps (from 1) whose loss was NaN or infinite.
    """

    loss_sum: float = 0.0
    non_finite: Sequence[int] = ()


@dataclass(frozen=True)
class Agreement:
    """What all ranks know after the exchange.

    Attributes:
        targets: target tokens of the coming window, on all ranks: the divisor of its loss.
        samples: samples of the coming window (rows that hold no sample aside).
        loss_sum: summed token losses of the finished window, on all ranks.
        stop: somebody asked one of the ranks to stop.
        culprit: (rank, micro-step) of the finished window whose loss was not finite, where it was one rank alone.
        non_finite_ranks: how many ranks saw such a loss.
        digest_sum: sum of the ranks' digests of their parameters.
        apart: some rank found in the exchange before that its digest was not the others'.
    """

    targets: int
    samples: int
    loss_sum: float
    stop: bool
    culprit: tuple[int, int] | None
    non_finite_ranks: int
    digest_sum: int
    apart: bool


class ControlExchange:
    """Sums eight float64 over the ranks: whole numbers are exact in them up to 2**53.

    A window's loss rides with the exchange of the next one, so that a window needs one exchange, before its first
    micro-step, and none at its end.
    """

    SIZE = 8
    """float64 numbers, i.e. 64 bytes."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._buffer = torch.zeros(self.SIZE, dtype=torch.float64, device=device)

    def __call__(
        self, *, targets: int, samples: int, finished: WindowReport, stop: bool, digest: int = 0, apart: bool = False
    ) -> Agreement:
        """One collective. Every rank calls it once per window, and once more after the last."""
        # With one rank at fault its (rank, micro-step) survives the sum; with several only their number does.
        code = self._rank * _MICRO_STEPS + finished.non_finite[0] - 1 if finished.non_finite else 0
        numbers = [targets, samples, finished.loss_sum, stop, bool(finished.non_finite), code, digest, apart]
        self._buffer.copy_(torch.tensor([float(number) for number in numbers], dtype=torch.float64))
        dist.all_reduce(self._buffer)
        all_targets, all_samples, loss_sum, stops, at_fault, code_sum, digests, ranks_apart = self._buffer.tolist()
        culprit = None
        if at_fault == 1:
            rank, index = divmod(int(code_sum), _MICRO_STEPS)
            culprit = (rank, index + 1)
        return Agreement(
            targets=int(all_targets),
            samples=int(all_samples),
            loss_sum=loss_sum,
            stop=stops > 0,
            culprit=culprit,
            non_finite_ranks=int(at_fault),
            digest_sum=int(digests),
            apart=ranks_apart > 0,
        )
