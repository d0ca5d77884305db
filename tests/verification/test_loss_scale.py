"""fp16's loss scale on one side only. No CPU of DeepSpeed's takes fp16, so this one is told that it does.

Run: pytest -n 0 tests/verification/test_loss_scale.py (ten seconds). The arithmetic is fp16's own, DeepSpeed's code is
what a GPU runs, the scale is fixed low enough not to overflow. Not covered: kernels of a GPU; a scale that is looked
for; ZeRO 0 but for DeepSpeed's own mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from dsaccum.engine.process import Ranks
from dsaccum.power.settings import Setting
from dsaccum.power.small_case import write_case
from dsaccum.verification.cases.inputs import PreparedCase, read_case
from dsaccum.verification.progress import SilentProgress
from dsaccum.verification.ranks.interface import TaskRunner
from dsaccum.verification.verify import Examined, Extent, examine, with_fault

SCALE_POWER = 12
NUMBERS_ALONE = Extent(memory="never", trajectory=False)


@dataclass
class HereAndNow:
    """Stands for a pool of one rank: tasks run in this process, where the accelerator can be told something."""

    ranks: Ranks
    on_message: Callable[[int, Any], None] = field(default=lambda rank, message: None)

    def run(self, task: Callable[..., Any], *arguments: Any, on_message: Any = None) -> list[Any]:
        self.on_message = on_message
        return [task(self, *arguments)]

    def send(self, message: Any) -> None:
        self.on_message(0, message)

    def at(self, step: int, micro_step: int, phase: str) -> None:
        pass


@pytest.fixture
def pool(one_rank: Ranks, monkeypatch: pytest.MonkeyPatch) -> TaskRunner:
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    return HereAndNow(one_rank)


def fp16(folder: Path, stage: int) -> PreparedCase:
    prepared = read_case(write_case(folder, Setting(1, 3, stage, "packed")))
    config = {**prepared.case.config, "fp16": {"enabled": True, "initial_scale_power": SCALE_POWER}}
    return replace(prepared, case=replace(prepared.case, precision="fp16", accumulation_dtype="fp16", config=config))


def found(prepared: PreparedCase, pool: TaskRunner, fault: str | None) -> Examined:
    return examine(with_fault(prepared, fault), pool, SilentProgress(), NUMBERS_ALONE)


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_a_scale_on_one_side_only_is_named(pool: TaskRunner, tmp_path: Path, stage: int) -> None:
    prepared = fp16(tmp_path, stage)
    clean = found(prepared, pool, None)
    assert clean.claims.which("fail") == []
    assert clean.claims.gradient == clean.claims.update == "pass"
    assert [step.optimizer_step.loss_scale for step in clean.evidence.steps if step.optimizer_step] == [4096.0] * 3
    for fault in ("loss-scale-not-applied", "loss-scale-not-removed"):
        examined = found(prepared, pool, fault)
        assert [(cause.id, cause.confidence) for cause in examined.causes] == [(fault, "certain")], examined.reasons


def test_another_wrong_factor_is_no_loss_scale(pool: TaskRunner, tmp_path: Path) -> None:
    examined = found(fp16(tmp_path, 1), pool, "loss-scaled-twice")
    assert [cause.id for cause in examined.causes] == ["loss-scaled-twice"]
