"""The scripts that show DeepSpeed's faults still show them; when DeepSpeed mends one, its test here fails.

Run: pytest -n 0 tests/audit/test_scripts.py. They run in this process, on one rank. Figures are those of docs/audit.md.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from dsaccum.engine.process import Ranks

SCRIPTS = Path(__file__).parents[2] / "docs/deepspeed-faults"
SHOWN = {
    "scale_wrt_gas": [
        "ZeRO 0, fp32, loss as the engine returned it: 0.25",
        "ZeRO 0, fp32, loss * 1.0: 1.00",
        "ZeRO 1, fp32, loss as the engine returned it: 1.00",
        "ZeRO 1, bf16 accumulated in fp32, loss as the engine returned it: 0.25",
    ],
    "scaled_backward": ["ZeRO 1, loss alone: 1.0000", "ZeRO 1, loss and logits: 0.2500"],
    "two_backwards": ["ZeRO 0: of 8 backward calls arrived 1.00, 1.00", "ZeRO 1: of 8 backward calls arrived 0.00"],
    "one_step_a_window": ["no_sync: 0.00, 0.00, 0.00, ", "coalesce_grad_reduction: 0.00, 0.00, 0.00, "],
    "empty_first_step": ["ZeRO 0: the first update is 0.7", "ZeRO 1: the first update is 1.000"],
    "decay_without_gradient": ["torch: 1.000", "ZeRO 0: 0.950", "ZeRO 1: 0.950", "ZeRO 2: 0.950"],
}  # fmt: skip


@pytest.mark.parametrize("name", SHOWN)
def test_it_shows_the_fault(one_rank: Ranks, capfd: pytest.CaptureFixture[str], name: str) -> None:
    runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    printed = capfd.readouterr().out
    for line in SHOWN[name]:
        assert line in printed


def test_every_script_is_run() -> None:
    assert {path.stem for path in SCRIPTS.glob("*.py")} == set(SHOWN)
