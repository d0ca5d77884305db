"""What low precision is named for, and that NaN is none of it.

Run: pytest tests/verification/test_precision_causes.py. Runs in which a sum loses small terms are in ``test_faults``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dsaccum.verification.comparison.rounding import accumulated
from dsaccum.verification.diagnosis.precision import low_precision_causes


@pytest.mark.parametrize(("broken", "named"), [(False, 1), (True, 0)])
def test_a_sum_in_bf16_is_named_and_a_column_of_nan_is_not(broken: bool, named: int) -> None:
    draw = torch.Generator().manual_seed(0)
    columns = [{"weight": torch.randn(64, generator=draw).double()} for _ in range(4)]
    found = accumulated(columns, [0.25] * 4, 1, torch.bfloat16)
    if broken:
        columns[2]["weight"][5] = float("nan")
    truth = SimpleNamespace(columns=columns, due_in_order=[0.25] * 4, gradient=found)
    step = SimpleNamespace(step=3, judged=[None], truth=truth, vectors=[found])
    batch = SimpleNamespace(world_size=1)
    case = SimpleNamespace(accumulation_dtype="fp32", communication_dtype="fp32", batch=batch)
    evidence = cast(Any, SimpleNamespace(case=case))
    assert len(low_precision_causes(evidence, [cast(Any, step)])) == named
