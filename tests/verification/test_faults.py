"""Each injected fault does what its description says, by hand-computed gradients, rates and counts; on one rank.

Run: pytest -n 0 tests/verification/test_faults.py. Others are in test_faults_past_weights.py, what needs two
ranks in test_faults_on_ranks.py. Whether `verify` finds and names the faults isn't tested here.

Bound: plain PyTorch in float64 against DeepSpeed in fp32, relative over all tensors. A correct run is at 2e-7 (about
sqrt(layers x operations) roundings of 6e-8); BOUND is 15 times that, and the smallest fault here is at 1e-2.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsaccum.config.errors import ConfigError
from dsaccum.engine.process import Ranks
from dsaccum.verification.cases.case import Case
from dsaccum.verification.cases.windows import case_stream
from dsaccum.verification.subject.faults import FAULTS, Fault, fault_of
from tests.verification.planting import (
    Run,
    difference,
    due_weights,
    make_case,
    run,
    weighted,
)

BOUND, STEPS = 3e-6, 3
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


@pytest.fixture(scope="module")
def clean(one_rank: Ranks) -> Run:
    """Three windows without a fault."""
    return run(one_rank, make_case(steps=STEPS, windows=3))


def test_every_fault_is_described_in_one_line() -> None:
    for identifier, fault in FAULTS.items():
        assert identifier == fault.id
        assert 20 < len(fault.summary) < 130
        assert not fault.summary.endswith(".")


def test_without_a_fault_everything_stays(one_rank: Ranks, clean: Run) -> None:
    case, fault = make_case(), fault_of(None)
    windows = case_stream(case, 0)
    assert fault.request(case) is case
    assert fault.alter(case) is case
    assert fault.feed(windows, case, 0) is windows
    assert fault.inapplicable(case) is None
    assert difference(clean.gradient(), weighted(make_case(steps=STEPS), due_weights(make_case(steps=STEPS)))) < BOUND
    assert clean.left == []
    # Faults are values shared by all runs of a process: having been planted, they leave nothing behind.
    for identifier in ("mean-of-means", "stale-gradients", "clipping-mismatch"):
        run(one_rank, make_case(identifier, steps=STEPS))
    again = run(one_rank, make_case(steps=STEPS, windows=3))
    assert [window.checksums for window in again.windows] == [window.checksums for window in clean.windows]


def test_a_misspelt_fault_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"--inject.*fix: --inject mean-of-means"):
        fault_of("mean-of-mean")
    with pytest.raises(ConfigError, match="allowed: loss-not-scaled"):
        fault_of("x")


def _scaled(factors: list[float]) -> Any:
    return lambda case: [[weight * factor for weight, factor in zip(due_weights(case)[0], factors, strict=True)]]


def _counted(count: str) -> Any:
    def weights(case: Case) -> list[list[float]]:
        labels = [
            label for batch in case_stream(case, 0).window(0) for row in batch["labels"].tolist() for label in row
        ]
        rows = STEPS * case.batch.micro_batch
        total = len([label for label in labels if label != -100]) if count == "labels" else len(labels)
        starts = sum(int(b["labels"][row, 0]) != -100 for b in case_stream(case, 0).window(0) for row in range(2))
        right = len([label for label in labels if label != -100]) - starts
        assert 0 < starts <= rows
        return [[weight * right / total for weight in due_weights(case)[0]]]

    return weights


WEIGHTS = {
    "loss-not-scaled": _scaled([STEPS] * STEPS),
    "loss-scaled-twice": _scaled([1 / STEPS] * STEPS),
    "only-last-micro-batch": _scaled([0, 0, 1]),
    "micro-batch-dropped": _scaled([1, 0, 1]),
    "mean-of-means": lambda case: [[1 / STEPS] * STEPS],
    "targets-counted-before-shift": _counted("labels"),
    "padding-counted": _counted("positions"),
}


@pytest.mark.parametrize("identifier", WEIGHTS)
def test_micro_batches_weigh_what_the_mistake_gives_them(one_rank: Ranks, clean: Run, identifier: str) -> None:
    case = make_case(identifier, steps=STEPS)
    found = run(one_rank, case)
    assert difference(found.gradient(), weighted(case, WEIGHTS[identifier](case))) < BOUND
    assert difference(found.gradient(), clean.gradient()) > 1e-2
    assert found.boundaries == [[STEPS], [STEPS]]
    assert found.left == []


@STAGES
@pytest.mark.parametrize("bf16", [False, True])
def test_a_factor_on_the_loss_reaches_the_gradient_at_every_stage(one_rank: Ranks, stage: int, bf16: bool) -> None:
    """N = 4: a power of two is exact in every format, so the ratio is exact to the bit."""
    right = run(one_rank, make_case(stage=stage, bf16=bf16)).gradient()
    wrong = run(one_rank, make_case("loss-not-scaled", stage=stage, bf16=bf16)).gradient()
    assert all(torch.equal(wrong[name], 4 * right[name]) for name in right)


@pytest.mark.parametrize("loop", ["hf-labels", "outside-loss", "FILE"])
def test_faults_are_the_same_in_every_loop(one_rank: Ranks, tmp_path: Path, loop: str) -> None:
    own = tmp_path / "loop.py"
    own.write_text("def loss(engine, micro_batch):\n    return engine(**micro_batch).loss\n")
    name = f"{own}:loss" if loop == "FILE" else loop
    right = run(one_rank, make_case(loop=name)).gradient()
    wrong = run(one_rank, make_case("loss-scaled-twice", loop=name)).gradient()
    assert all(torch.equal(wrong[name], right[name] / 4) for name in right)


def test_counts_are_wrong_in_the_same_way_where_the_loop_weighs_by_means(one_rank: Ranks) -> None:
    case = make_case("targets-counted-before-shift", steps=STEPS, loop="outside-loss")
    assert difference(run(one_rank, case).gradient(), weighted(case, WEIGHTS[case.fault or ""](case))) < BOUND


@STAGES
def test_the_optimizer_steps_at_every_micro_step(one_rank: Ranks, stage: int) -> None:
    found = run(one_rank, make_case("step-inside-window", steps=STEPS, stage=stage))
    assert found.boundaries == [[1, 2, 3], [1, 2, 3]]
    # Nobody divides by N: the first micro-batch alone, N times what it is due.
    case = make_case(steps=STEPS)
    assert difference(found.gradient(), weighted(case, _scaled([STEPS, 0, 0])(case))) < BOUND


@STAGES
def test_the_boundary_comes_one_micro_step_early(one_rank: Ranks, stage: int) -> None:
    found = run(one_rank, make_case("boundary-shifted", steps=STEPS, stage=stage))
    assert found.boundaries == [[2], [2]]
    case = make_case(steps=STEPS)
    assert difference(found.gradient(), weighted(case, _scaled([1, 1, 0])(case))) < BOUND


@STAGES
def test_a_window_adds_to_what_the_one_before_left(one_rank: Ranks, clean: Run, stage: int) -> None:
    """The first window is right, so the second starts from the same parameters, and the third doesn't."""
    found = run(one_rank, make_case("stale-gradients", steps=STEPS, stage=stage))
    assert difference(found.gradient(0), clean.gradient(0)) < BOUND
    expected = {name: clean.gradient(0)[name] + clean.gradient(1)[name] for name in clean.gradient(0)}
    assert difference(found.gradient(1), expected) < BOUND
    assert found.left == []


@STAGES
def test_one_parameter_loses_its_gradient(one_rank: Ranks, clean: Run, stage: int) -> None:
    found = run(one_rank, make_case("parameter-gradient-lost", steps=STEPS, stage=stage)).gradient()
    lost = [name for name, gradient in found.items() if not gradient.any()]
    assert lost == ["transformer.h.0.attn.c_attn.bias"]
    others = [{name: g for name, g in gradient.items() if name not in lost} for gradient in (found, clean.gradient())]
    assert difference(*others) < BOUND


def test_one_sample_of_the_next_window_stands_in_this_one(one_rank: Ranks) -> None:
    case = make_case("samples-misplaced")
    found, stream = run(one_rank, case), case_stream(case, 0)
    for index, next_index in ((0, 1), (1, 0)):
        fed, due = found.windows[index].micro_batches, stream.window(index)
        later = stream.window(next_index)[0]
        for field, rows in due[-1].items():
            assert all(torch.equal(fed[step][field], due[step][field]) for step in range(3))
            width = min(rows.size(1), fed[-1][field].size(1), later[field].size(1))
            assert torch.equal(fed[-1][field][0, :width], rows[0, :width])
            assert torch.equal(fed[-1][field][1, :width], later[field][0, :width])
        assert _tokens(fed[-1]["input_ids"][1]) == _tokens(later["input_ids"][0])


@pytest.mark.parametrize("padded", [False, True])
def test_labels_are_one_row_late(one_rank: Ranks, padded: bool) -> None:
    case = make_case("fields-misaligned", padded=padded)
    fed, due = run(one_rank, case).windows[0].micro_batches, case_stream(case, 0).window(0)
    labels = [row for batch in due for row in batch["labels"]]
    for step, (found, right) in enumerate(zip(fed, due, strict=True)):
        assert all(torch.equal(found[name], right[name]) for name in right if name != "labels")
        for row in range(2):
            expected = labels[(2 * step + row + 1) % len(labels)]
            width = min(len(expected), found["labels"].size(1))
            assert torch.equal(found["labels"][row, :width], expected[:width])
            assert (found["labels"][row, width:] == -100).all()


INAPPLICABLE = [
    ("loss-not-scaled", {"steps": 1}, "N = 1"),
    ("micro-batch-dropped", {"steps": 1}, "N = W = 1"),
    ("ranks-summed", {}, "one rank"),
    ("mean-of-means", {"padded": False}, "same number of targets"),
    ("mean-of-means", {"loop": "hf-labels"}, "by itself"),
    ("padding-counted", {"padded": False}, "no padding"),
    ("padding-counted", {"loop": "mine.py:loss"}, "not known"),
    ("stale-gradients", {"windows": 1}, "one step"),
    ("ranks-not-reduced", {"ranks": 2, "stage": 1}, "ZeRO 1"),
    ("reduced-every-micro-step", {"stage": 2}, "by design"),
    ("ranks-start-apart", {"ranks": 2, "stage": 3}, "ZeRO 3"),
    ("samples-misplaced", {"windows": 1}, "one step"),
    ("fields-misaligned", {"steps": 1, "rows": 1}, "one row"),
    ("clipped-every-micro-step", {}, "clips nothing"),
    ("clipped-every-micro-step", {"clipping": 1.0, "stage": 2}, "no whole sum"),
    ("loss-not-additive", {"loop": "hf-labels"}, "loss.factory"),
    ("low-precision-accumulation", {"bf16": True}, "bf16 itself"),
    ("loss-scale-not-applied", {}, "no loss scale"),
    ("loss-scale-not-removed", {"bf16": True}, "no loss scale"),
    ("short-window-full-divisor", {}, "is short"),
    ("short-window-full-divisor", {"last_window": "short", "windows": 1}, "is short"),
    ("short-window-full-divisor", {"last_window": "short", "loop": "outside-loss"}, "by itself"),
    ("same-seed-on-every-rank", {}, "one rank"),
]


@pytest.mark.parametrize(("identifier", "case", "reason"), INAPPLICABLE)
def test_what_cannot_show_itself_says_why(identifier: str, case: dict[str, Any], reason: str) -> None:
    unfit = FAULTS[identifier].inapplicable(make_case(**case))
    assert unfit is not None
    assert reason in unfit.reason


def test_what_the_config_lacks_is_said() -> None:
    case = make_case()
    bare = {key: value for key, value in case.config.items() if key != "scheduler"}
    reasons = {
        "schedule-offset": replace(case, config=bare),
        "rate-mismatch": replace(case, config={**bare, "optimizer": {"type": "SGD", "params": {}}}),
        "optimizer-count-offset": replace(case, config={**bare, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}),
    }
    faults: dict[str, Fault] = FAULTS
    found = {identifier: faults[identifier].inapplicable(lacking) for identifier, lacking in reasons.items()}
    assert found == {
        "schedule-offset": ("the config has no scheduler", 'a "scheduler" in the JSON'),
        "rate-mismatch": ("the config states no learning rate", '"lr" in optimizer.params'),
        "optimizer-count-offset": ("SGD has no bias correction that counts steps", None),
    }


def _tokens(row: torch.Tensor) -> list[int]:
    return [token for token in row.tolist() if token != 0]
