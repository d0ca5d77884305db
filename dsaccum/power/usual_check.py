"""What people usually do: train both ways for some steps with the optimizer they use, and compare the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dsaccum.verification.subject.capture import OptimizerStep


def parameters_agree(run: Mapping[str, Tensor], big_batch: Mapping[str, Tensor]) -> bool:
    """``torch.testing.assert_close`` with its own tolerances (float32: 1.3e-6 relative, 1e-5 absolute)."""
    try:
        torch.testing.assert_close(dict(run), dict(big_batch))
    except AssertionError:
        return False
    return True


def final_parameters(steps: Sequence[OptimizerStep | None]) -> Mapping[str, Tensor] | None:
    """What the last step of the optimizer that there was has left, on rank 0; None where there was none."""
    return next((step.after.masters for step in reversed(steps) if step is not None and step.after is not None), None)
