"""On paper: from which N on the gradient's reduction no longer counts, on many GPUs. Nothing is measured.

Run: python tests/benchmarks/overlap_on_paper.py [--parameters 7e9] [--ranks 64] [--tokens 4096] [--peak 989e12]
         [--mfu 0.4] [--bytes 2] [--share 0.05]

    reduction   r = 2 (W - 1) / W  b P / bandwidth      a ring: each GPU sends and receives that many bytes
    micro-step  c = 6 P tokens / (peak x MFU)           two thirds of it the backward

A window takes N c + r where the reduction follows the last backward, and N c + max(0, r - 2 c / 3) where it runs
beside it. Where each micro-step reduces (ZeRO 2 and 3), N takes nothing off: N (c + r), or at best N max(c, c / 3 + r).
Left out: latency, other traffic on the links, ZeRO 3's gathering of parameters, and what communication takes from the
cores that compute.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

LINKS = {
    "NVLink 4, one way": 450e9,
    "InfiniBand 400 Gbit/s": 50e9,
    "Ethernet 100 Gbit/s": 12.5e9,
    "Ethernet 25 Gbit/s": 3.125e9,
    "Ethernet 10 Gbit/s": 1.25e9,
}
"""Bytes per second of one GPU, each way."""


@dataclass(frozen=True)
class Assumed:
    """What the calculation stands on.

    Attributes:
        parameters: P.
        ranks: W.
        tokens: of a micro-batch on one GPU.
        peak: FLOP/s of one GPU, dense, in the type that is computed in.
        mfu: the share of it that training reaches.
        bytes_each: b, of one gradient element as communicated.
    """

    parameters: float = 7e9
    ranks: int = 64
    tokens: int = 4096
    peak: float = 989e12
    mfu: float = 0.4
    bytes_each: int = 2

    @property
    def micro_step(self) -> float:
        """Seconds."""
        return 6 * self.parameters * self.tokens / (self.peak * self.mfu)

    def reduction(self, bandwidth: float) -> float:
        """Seconds."""
        return 2 * (self.ranks - 1) / self.ranks * self.bytes_each * self.parameters / bandwidth

    def waited(self, bandwidth: float, *, beside_backward: bool) -> float:
        """Seconds of a window in which nothing is computed."""
        hidden = 2 / 3 * self.micro_step if beside_backward else 0.0
        return max(0.0, self.reduction(bandwidth) - hidden)

    def share(self, bandwidth: float, steps: int, *, beside_backward: bool = False) -> float:
        """Of a window's time that is waited, for N = ``steps``."""
        waited = self.waited(bandwidth, beside_backward=beside_backward)
        return waited / (steps * self.micro_step + waited)

    def steps_for(self, bandwidth: float, share: float, *, beside_backward: bool) -> int:
        """The smallest N at which no more than this share is waited."""
        waited = self.waited(bandwidth, beside_backward=beside_backward)
        return max(1, math.ceil(waited * (1 - share) / (share * self.micro_step) - 1e-9))


def main() -> None:
    from side_by_side import show

    parser = argparse.ArgumentParser()
    parser.add_argument("--parameters", type=float, default=7e9)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--peak", type=float, default=989e12)
    parser.add_argument("--mfu", type=float, default=0.4)
    parser.add_argument("--bytes", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.05)
    arguments = parser.parse_args()
    assumed = Assumed(
        arguments.parameters, arguments.ranks, arguments.tokens, arguments.peak, arguments.mfu, arguments.bytes
    )
    rows = []
    for name, bandwidth in LINKS.items():
        shares = [f"{assumed.share(bandwidth, steps):.1%}" for steps in (1, 4, 16, 64)]
        least = [assumed.steps_for(bandwidth, arguments.share, beside_backward=beside) for beside in (False, True)]
        rows.append([name, f"{assumed.reduction(bandwidth):.2f}", *shares, *least])
    show(
        f"P = {assumed.parameters:.3g}, W = {assumed.ranks}, {assumed.tokens:,} tokens: a micro-step computes "
        f"{assumed.micro_step:.3f} s",
        ["link of each GPU", "reduction, s", "waited at N = 1", "4", "16", "64",
         f"N for {arguments.share:.0%}", f"N for {arguments.share:.0%}, beside the last backward"], rows,
    )  # fmt: skip


if __name__ == "__main__":
    main()
