"""Fixes speak of what drives the run. Run: pytest tests/watch/test_fixes.py.

Not covered: that each works when it is followed.
"""

from __future__ import annotations

import pytest

from dsaccum.verification.diagnosis.causes import ADVICE
from dsaccum.watch.fixes import fix_for

RUNS = [
    ("Trainer", "DDP"),
    ("TRL", "DeepSpeed"),
    ("Accelerate", "DDP"),
    ("Accelerate", "DeepSpeed"),
    ("", "DeepSpeed"),
    ("", "bare"),
    ("", "bare, several ranks"),
]


@pytest.mark.parametrize(
    ("identifier", "framework", "kind", "says"),
    [
        ("short-window-full-divisor", "Accelerate", "bare", "multiply the loss by N / held"),
        ("short-window-full-divisor", "", "bare", "divide by the micro-batches"),
        ("rank-mean-of-means", "Trainer", "DDP", "average_tokens_across_devices=True"),
        ("rank-mean-of-means", "TRL", "DeepSpeed", "average_tokens_across_devices=True"),
        ("rank-mean-of-means", "Accelerate", "DDP", "accelerator.gather"),
        ("rank-mean-of-means", "", "DDP", "all-reduce the window's target count"),
        ("ranks-share-data", "Accelerate", "DDP", "accelerator.prepare()"),
        ("ranks-share-data", "", "DDP", "DistributedSampler"),
    ],
)
def test_in_its_terms(identifier: str, framework: str, kind: str, says: str) -> None:
    assert says in fix_for(identifier, framework, kind, ADVICE[identifier].fix)


@pytest.mark.parametrize(("framework", "kind"), RUNS)
def test_nobody_is_told_of_rules_and_files_of_dsaccum(framework: str, kind: str) -> None:
    for identifier in ("samples-misplaced", "short-window-full-divisor", "micro-batch-dropped"):
        fix = fix_for(identifier, framework, kind, ADVICE[identifier].fix)
        assert "(k W + r) B + j" not in fix
        assert "matrix" not in fix
        assert "last_window" not in fix
