"""A kept verdict must not outlive the code, the config or the model that it was reached with.

Run: pytest -n 0 tests/preflight/test_fingerprint.py. Not covered: what patches close over.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dsaccum.loss
from dsaccum.config.factories import load_factory
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
        (torch.distributed, "all_reduce", another),
        (torch.nn.functional, "cross_entropy", another),
        (torch.Tensor, "backward", another),
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


@pytest.mark.parametrize("helper", [False, True])
def test_every_word_of_the_users_own_files_counts(
    tmp_path: Path, helper: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Constants, defaults of arguments, and what a factory's file imports."""
    monkeypatch.syspath_prepend(str(tmp_path))
    own = tmp_path / ("own_helper.py" if helper else "own_factory.py")
    (tmp_path / "own_factory.py").write_text("import own_helper\n\ndef build():\n    return own_helper\n")
    (tmp_path / "own_helper.py").write_text("TWICE = False\n\ndef loss(more=False):\n    return TWICE\n")
    load_factory(f"{tmp_path / 'own_factory.py'}:build", key="model.factory")
    before = fingerprint(GIVEN)
    own.write_text(own.read_text().replace("False", "True") + "# more\n")
    assert fingerprint(GIVEN) != before
    sys.modules.pop("own_helper")


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
