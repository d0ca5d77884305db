"""``dsaccum plan``: flags, exit codes, files. Nothing is planned here: the work is a stub.

Run: pytest tests/cli/test_plan.py -n 0. Not covered: what the plan says, see tests/planning.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dsaccum.cli import main
from dsaccum.planning.flags import PlanFlags
from dsaccum.planning.record import (
    BatchRecord,
    ModelRecord,
    PhaseRecord,
    PlanRecord,
    PriceRecord,
    SplitRecord,
    WayRecord,
)

pytestmark = pytest.mark.usefixtures("in_a_folder")
WORDS = ["plan", "--experiment", "e.yaml", "--effective-batch", "8", "--ranks", "2", "--memory", "1GiB"]


def planned(*, fits: bool) -> PlanRecord:
    phases = {
        phase: PhaseRecord(peak_bytes=10, by_category={"parameters": 10}) for phase in ("forward", "backward", "step")
    }
    split = SplitRecord(micro_batch=4, accumulation_steps=1, peak_bytes=10, phase="step", phases=phases)
    way = WayRecord(
        zero_stage=0,
        precision="fp32",
        accumulation_dtype="fp32",
        activation_checkpointing=False,
        reduce_bucket_bytes=0,
        fits=fits,
        best=split if fits else None,
        splits=[split],
        price=PriceRecord(compute=1.0, gradient_bytes=0, parameter_bytes=0),
    )
    return PlanRecord(
        fits=fits,
        experiment="e.yaml",
        deepspeed=None,
        device="cpu",
        memory_bytes=2**30,
        effective_batch=BatchRecord(world_size=2, micro_batch=4, accumulation_steps=1, total=8) if fits else None,
        model=ModelRecord(class_name="Small", parameters=3, trained=3, logits_bytes_per_sample=4),
        asked=way,
        chosen=way if fits else None,
        others=[],
    )


class StubPlan:
    def __init__(self) -> None:
        self.fits = True
        self.calls: list[PlanFlags] = []

    def make_plan(self, flags: PlanFlags, progress: Any) -> Any:
        self.calls.append(flags)
        plan = ModuleType("plan")
        plan.record = planned(fits=self.fits)  # type: ignore[attr-defined]
        plan.config = {"train_batch_size": 8} if self.fits else None  # type: ignore[attr-defined]
        return plan


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubPlan:
    stub, module = StubPlan(), ModuleType("dsaccum.planning.plan")
    module.make_plan = stub.make_plan  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return stub


def test_what_fits_is_0_and_its_json_is_written(
    stub: StubPlan, in_a_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, "--write", "out.json", "--json", "plan.json", "--device", "cuda"]) == 0
    shown = capsys.readouterr().out
    assert "plan            ZeRO 0, fp32: 2 ranks x 1 step x 4 micro-batch = 8\n" in shown
    assert (in_a_folder / "out.json").read_text() == '{\n  "train_batch_size": 8\n}\n'
    assert PlanRecord.read(in_a_folder / "plan.json").written == "out.json"
    flags = stub.calls[0]
    assert (flags.effective_batch, flags.ranks, flags.memory, flags.device) == (8, 2, 2**30, "cuda")


def test_what_does_not_fit_is_1_and_nothing_is_written(stub: StubPlan, in_a_folder: Path) -> None:
    stub.fits = False
    assert main([*WORDS, "--write", "out.json"]) == 1
    assert not (in_a_folder / "out.json").exists()


@pytest.mark.parametrize("fits", [True, False])
def test_its_page_is_written_whether_it_fits_or_not(stub: StubPlan, in_a_folder: Path, *, fits: bool) -> None:
    stub.fits = fits
    assert main([*WORDS, "--html", "plan.html", "--json", "plan.json"]) == (0 if fits else 1)
    assert main(["report", "plan.json", "-o", "again.html"]) == 0
    said = "FITS: ZeRO 0, fp32: 2 ranks x 1 step" if fits else "DOES NOT FIT: ZeRO 0, fp32"
    for page in ("plan.html", "again.html"):
        assert said in (in_a_folder / page).read_text()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["plan"], "error: --experiment: is missing; fix: --experiment launch/experiments/llama-nano.yaml"),
        (WORDS[:-2], "error: --memory: is missing; fix: --memory 24GiB"),
        ([*WORDS[:-1], "much"], 'error: --memory = "much": is no amount of memory; allowed: e.g. 24GiB, 80GB, 500MiB; '
                                "fix: --memory 24GiB"),
        ([*WORDS, "--device", "tpu"], 'error: --device = "tpu": is no device; allowed: cpu or cuda; '
                                      "fix: --device cuda"),
        ([*WORDS, "--write", "ds.json"], 'error: --write = "ds.json": is there already, and records don\'t overwrite '
                                         "one another; fix: --write ds-2.json, or delete it"),
    ],
)  # fmt: skip
def test_mistakes_are_2(words: list[str], line: str, stub: StubPlan, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err == f"{line}\n"
    assert not stub.calls
