"""What of a gradient the target tokens don't tell of, so that their weights alone can't prove it right.

That is another term of the loss, which reached the parameters past the logits, as that of a router does: nobody knows
how it is to be normalised. And it is the statistics of a micro-batch, by which its own rows are normalised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dsaccum.watch.recording import Forward, norm_of

LEAST_BESIDE = 1e-5
"""What is less of a gradient may be the order in which fp32 was added up."""


def share_beside(whole: Mapping[str, Tensor], part: Mapping[str, Tensor]) -> float:
    """How much of ``whole`` is not in ``part``, relative; 0 where rounding can be why.

    A term may be small beside all the rest and yet most of what a single tensor gets, as a router's is.
    """
    sizes = {name: norm_of(tensor) for name, tensor in whole.items()}
    rests = {name: norm_of(g - part[name]) if name in part else sizes[name] for name, g in whole.items()}
    size, rest = math.hypot(*sizes.values()), math.hypot(*rests.values())
    if not size:
        return 0.0
    allowed = max([LEAST_BESIDE, *(4 * torch.finfo(tensor.dtype).eps for tensor in whole.values())])
    single = any(rests[name] > 4 * allowed * own > 4 * allowed**2 * size for name, own in sizes.items())
    return rest / size if rest > allowed * size or single else 0.0


def own_statistics(module: nn.Module, modes: list[bool], *, alone: bool) -> str | None:
    """A part that normalises rows by the others of their micro-batch, which are not those of the whole batch.

    Args:
        module: the user's own.
        modes: ``training`` of every part, as the forward had it.
        alone: it is the only micro-step of the window, whose ranks ``SyncBatchNorm`` brings together.
    """
    for (name, part), training in zip(module.named_modules(), modes, strict=False):
        together = alone and isinstance(part, nn.SyncBatchNorm)
        if (
            isinstance(part, nn.modules.batchnorm._BatchNorm)
            and not together
            and (training or part.running_mean is None)
        ):
            return f"{name} ({type(part).__name__})" if name else type(part).__name__
    return None


def statistics_in(module: nn.Module, micro_steps: Sequence[Sequence[Forward]], ranks: int) -> str | None:
    """Likewise, in any forward of a window; one micro-step on one rank is the whole batch."""
    alone = len(micro_steps) == 1
    if alone and ranks == 1:
        return None
    forwards = (forward for forwards in micro_steps for forward in forwards)
    found = (own_statistics(module, forward.modes, alone=alone) for forward in forwards)
    return next((name for name in found if name), None)
