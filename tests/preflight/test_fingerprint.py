"""A kept verdict must not outlive the code, the config or the model that it was reached with.

Run: pytest -n 0 tests/preflight/test_fingerprint.py. Not covered: what patches close over.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dsaccum.loss
from dsaccum.preflight.fingerprint import fingerprint
from tests.training.launching import environment

GIVEN = {"config": {"gradient_accumulation_steps": 4}, "versions": {"deepspeed": "0.19.8"}}


def test_the_same_again() -> None:
    assert fingerprint(GIVEN) == fingerprint(GIVEN)


def test_circumstances_count() -> None:
    other = {**GIVEN, "config": {"gradient_accumulation_steps": 8}}
    assert fingerprint(other) != fingerprint(GIVEN)


def another(self: Any, *arguments: Any) -> None:
    """Stands for a patch."""


@pytest.mark.parametrize(
    ("owner", "name", "patch"),
    [
        (torch.optim.AdamW, "step", another),
        (dsaccum.loss.CausalLMLoss, "sum", another),
        (dsaccum.loss.CausalLMLoss, "sum", dsaccum.loss.CausalLMLoss.count),
        (dsaccum.loss, "build_loss", another),
        (dsaccum.loss, "CausalLMLoss", type("Mine", (), {})),
        (torch.optim.Optimizer, "zero_grad", staticmethod(another)),
        (torch.optim.Optimizer, "state", property(another)),
    ],
)
def test_patches_count(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, patch: Callable[..., Any]) -> None:
    before = fingerprint(GIVEN)
    monkeypatch.setattr(owner, name, patch, raising=False)
    assert fingerprint(GIVEN) != before
    monkeypatch.undo()
    assert fingerprint(GIVEN) == before


def test_what_a_decorator_hides_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(GIVEN)
    monkeypatch.setattr(torch.optim.AdamW.step, "__wrapped__", another)
    assert fingerprint(GIVEN) != before


def test_other_processes_find_the_same_number() -> None:
    """Sets and strings have another order in every process, unless it is asked for."""
    program = (
        "import dsaccum.config.keys, dsaccum.config.advice; "
        "from dsaccum.preflight.fingerprint import fingerprint; print(fingerprint({'a': 1}))"
    )
    said = [_said(program, seed) for seed in ("1", "2")]
    assert said[0] == said[1] != ""


def _said(program: str, seed: str) -> str:
    command, given = [sys.executable, "-c", program], environment(PYTHONHASHSEED=seed)
    return subprocess.run(command, env=given, capture_output=True, text=True, check=True).stdout
