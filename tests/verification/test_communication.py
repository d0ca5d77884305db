"""What a window communicates: bytes by hand, the formula, two witnesses; two ranks, one start for all tests.

Run: pytest -n 0 tests/verification/test_communication.py. The tiny GPT has 27,584 parameters in matrices of 64 rows and
more and vectors, all of even size, so that nothing is padded at W = 2. Not covered: NCCL, experts over several ranks.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from dsaccum.engine.process import Ranks
from dsaccum.verification.cases.case import Case
from dsaccum.verification.measures.communication import Traffic, judge_communication, measure_traffic
from dsaccum.verification.subject.loops import Subject
from tests.cases import Case as PlainCase
from tests.cases import StillDog
from tests.instruments.shared import measured_once
from tests.verification.planting import make_case, run

PARAMETERS, STEPS = 27584, 4
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
BF16 = {"bf16": {"enabled": True}}
IN_FP32 = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
LOOPS = Path(__file__).with_name("odd_loops.py")

# Name -> (case, more of the JSON).
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ZeRO 0": ({"clipping": 1.0}, {}),
    "ZeRO 0, N = 16": ({"clipping": 1.0, "steps": 16}, {}),
    "ZeRO 0, N = 1": ({"steps": 1}, {}),
    "ZeRO 1": ({"stage": 1}, {}),
    "ZeRO 2": ({"stage": 2}, {}),
    "ZeRO 3": ({"stage": 3}, {}),
    "bf16, ZeRO 0": ({}, BF16),
    "bf16, ZeRO 1": ({"stage": 1}, BF16),
    "bf16 in fp32, ZeRO 1": ({"stage": 1}, IN_FP32),
    "bf16, ZeRO 2": ({"stage": 2}, BF16),
    "bf16, ZeRO 3": ({"stage": 3}, BF16),
    "autocast, ZeRO 0": ({}, AUTOCAST),
    "autocast, ZeRO 1": ({"stage": 1}, AUTOCAST),
    "autocast, ZeRO 2": ({"stage": 2}, AUTOCAST),
    "autocast, ZeRO 3": ({"stage": 3}, AUTOCAST),
    "hf-labels": ({"loop": "hf-labels"}, {}),
    "outside-loss, ZeRO 1": ({"loop": "outside-loss", "stage": 1}, {}),
    "sums_its_loss": ({"loop": f"{LOOPS}:sums_its_loss"}, {}),
    "gathers_objects": ({"loop": f"{LOOPS}:gathers_objects"}, {}),
    "reduced-every-micro-step": ({"fault": "reduced-every-micro-step"}, {}),
    "step-inside-window": ({"fault": "step-inside-window"}, {}),
    "ranks-not-reduced": ({"fault": "ranks-not-reduced"}, {}),
    "reduces_one_tensor": ({"loop": f"{LOOPS}:reduces_one_tensor"}, {}),
    "reduces_one_tensor, ZeRO 1": ({"loop": f"{LOOPS}:reduces_one_tensor", "stage": 1}, {}),
    "reduces_on_another_thread": ({"loop": f"{LOOPS}:reduces_on_another_thread"}, {}),
    "steps_twice": ({"loop": f"{LOOPS}:steps_twice"}, {}),
}
WRONG = [name for name in CASES if name.partition(",")[0].replace("_", "-") in {
    "reduced-every-micro-step", "step-inside-window", "ranks-not-reduced", "reduces-one-tensor",
    "reduces-on-another-thread", "steps-twice",
}]  # fmt: skip
RIGHT = [name for name in CASES if name not in WRONG]
Found = dict[str, list[Traffic]]
"""Of each case, by rank."""


def case_of(name: str, ranks: int = 2) -> Case:
    written, more = CASES[name]
    case = make_case(**{"ranks": ranks, "steps": STEPS, "windows": 1, "padded": False, **written})
    return replace(case, config={**case.config, **more})


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    by_rank = measured_once(tmp_path_factory, "communication-two-ranks", measure, world_size=2)
    return {name: [of_rank[name] for of_rank in by_rank] for name in CASES}


def measure(ranks: Ranks) -> dict[str, Traffic]:
    return {name: traffic_of(ranks, case_of(name)) for name in CASES}


def traffic_of(ranks: Ranks, case: Case) -> Traffic:
    def second_window(subject: Subject, loop: Callable[[], object]) -> Traffic:
        loop()
        return measure_traffic(subject, loop)

    return run(ranks, case, second_window).seen


def judged(found: Found, name: str) -> tuple[Any, str, str, dict[str, Any] | None]:
    return judge_communication(found[name], case_of(name))


@pytest.mark.distributed
def test_zero_0_sends_each_gradient_once_at_the_boundary(found: Found) -> None:
    """4 bytes per fp32 parameter; the norm's 4 bytes and the loop's two exchanges of 64 are control."""
    for traffic in found["ZeRO 0"]:
        assert traffic.gradient_bytes == [0, 0, 0, 4 * PARAMETERS]
        assert traffic.deepspeed_control_bytes == (0, 0, 0, 4)
        assert [step.control_bytes for step in traffic.measured] == [64, 0, 0, 64 + 4]
        assert not any(step.parameter_bytes for step in traffic.measured)
    assert found["ZeRO 0, N = 16"][0].gradient_bytes == [0] * 15 + [4 * PARAMETERS]
    assert found["ZeRO 0, N = 1"][0].gradient_bytes == [4 * PARAMETERS]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "due"),
    {
        "ZeRO 1": [0, 0, 0, 4],
        "ZeRO 2": [4, 4, 4, 4],
        "ZeRO 3": [4, 4, 4, 4],
        "bf16, ZeRO 0": [0, 0, 0, 2],
        "bf16, ZeRO 1": [0, 0, 0, 2],
        "bf16 in fp32, ZeRO 1": [0, 0, 0, 2],
        "bf16, ZeRO 2": [2, 2, 2, 2],
        "bf16, ZeRO 3": [2, 2, 2, 2],
        "autocast, ZeRO 0": [0, 0, 0, 4],
        "hf-labels": [0, 0, 0, 4],
        "outside-loss, ZeRO 1": [0, 0, 0, 4],
    }.items(),
)
def test_bytes_per_parameter_and_micro_step(found: Found, name: str, due: list[int]) -> None:
    for traffic in found[name]:
        assert traffic.gradient_bytes == [each * PARAMETERS for each in due]


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_autocast_sends_linear_layers_in_bf16(found: Found, stage: int) -> None:
    """The tied lm_head makes the embedding, 50 x 32, a linear layer's weight; GPT-2's other layers are no nn.Linear."""
    once = 4 * PARAMETERS - 2 * 50 * 32
    early = 0 if stage == 1 else once
    assert found[f"autocast, ZeRO {stage}"][0].gradient_bytes == [early] * 3 + [once]


@pytest.mark.distributed
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_passes(found: Found, name: str) -> None:
    record, state, reason, finding = judged(found, name)
    stage, steps = case_of(name).zero_stage, case_of(name).batch.accumulation_steps
    assert (state, finding) == ("pass", None), reason
    assert record.only_at_boundary == (stage < 2 or steps == 1)
    assert ("by design" in reason) == (stage >= 2)
    assert len(record.per_micro_step) == steps
    assert record.per_micro_step[-1].gradient_bytes == record.expected_gradient_bytes


@pytest.mark.distributed
@pytest.mark.parametrize("name", RIGHT)
def test_both_witnesses_agree(found: Found, name: str) -> None:
    """Function by function; only a loop's own exchanges, which are control traffic, pass deepspeed.comm by."""
    for traffic in found[name]:
        seen = {function for function, size in traffic.logger_bytes.items() if size}
        assert seen
        assert {name: traffic.dispatcher_bytes[name] for name in seen} == {
            name: traffic.logger_bytes[name] for name in seen
        }
        assert set(traffic.past_the_logger) == {"control"}
    witnesses = judged(found, name)[0].witnesses
    assert witnesses["agree"] is True
    control = witnesses["deepspeed_control_bytes"]
    assert control["measured"] == control["expected"]
    operations = witnesses["gradient_operations"]
    for count, (least, most) in zip(operations["measured"], operations["expected"], strict=True):
        assert least <= count <= most


@pytest.mark.distributed
def test_objects_are_no_contradiction(found: Found) -> None:
    """The logger counts no bytes for them; the dispatcher sees their pickles."""
    traffic = found["gathers_objects"][0]
    assert traffic.logger_bytes["all_gather_object"] == 0
    assert traffic.dispatcher_bytes["all_gather_object"] > 0


@pytest.mark.distributed
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_fails(found: Found, name: str) -> None:
    record, state, reason, finding = judged(found, name)
    assert state == "fail", reason
    assert record.only_at_boundary is (name == "reduces_on_another_thread")
    assert (finding is not None) == (name == "reduced-every-micro-step")


@pytest.mark.distributed
def test_n_times_the_traffic_is_named(found: Found) -> None:
    record, _, reason, finding = judged(found, "reduced-every-micro-step")
    assert finding == {
        "id": "reduced-every-micro-step",
        "zero_stage": 0,
        "gradient_bytes": [4 * PARAMETERS] * 4,
        "expected_gradient_bytes": [0, 0, 0, 4 * PARAMETERS],
    }
    assert reason == (
        "rank 0, micro-step 1 of 4: 110,336 gradient bytes, 0 are due at ZeRO 0; 3 of 4 micro-steps differ"
    )
    assert record.witnesses["agree"] is True


@pytest.mark.distributed
def test_a_step_in_every_micro_step_is_something_else(found: Found) -> None:
    """The same bytes, but the optimizer stepped each time."""
    traffic = found["step-inside-window"][0]
    assert traffic.gradient_bytes == found["reduced-every-micro-step"][0].gradient_bytes
    assert traffic.optimizer_steps == (1, 2, 3, 4)


@pytest.mark.distributed
def test_one_tensor_too_many_is_seen_to_the_byte(found: Found) -> None:
    """The embedding, 50 x 32, from the second micro-step on; torch.distributed's call has no second witness."""
    for name in ("reduces_one_tensor", "reduces_one_tensor, ZeRO 1"):
        record = judged(found, name)[0]
        extra = 4 * 50 * 32
        assert [step.gradient_bytes for step in record.per_micro_step] == [0, extra, extra, extra + 4 * PARAMETERS]
        assert record.witnesses["agree"] is False
        assert record.witnesses["past_the_logger"]["gradient"] == 3 * extra


@pytest.mark.distributed
def test_a_collective_on_another_thread_is_seen_by_one_witness_alone(found: Found) -> None:
    record, _, reason, _ = judged(found, "reduces_on_another_thread")
    assert [step.gradient_bytes for step in record.per_micro_step] == [0, 0, 0, 4 * PARAMETERS]
    assert record.witnesses["agree"] is False
    for traffic in found["reduces_on_another_thread"]:
        assert traffic.contradictions == {"all_reduce": (4 * PARAMETERS, 4 * PARAMETERS + STEPS * 4000)}
    assert "by DeepSpeed's comms logger" in reason


@pytest.mark.distributed
def test_more_steps_than_micro_batches(found: Found) -> None:
    _, _, reason, _ = judged(found, "steps_twice")
    assert reason == (
        "rank 0 called engine.step() 8 times in a window of 4 micro-batches, "
        "with 220,672 gradient bytes where 110,336 are due"
    )


@pytest.mark.distributed
def test_any_rank_can_fail(found: Found) -> None:
    good, bad = found["ZeRO 0"][0], found["reduced-every-micro-step"][1]
    record, state, reason, finding = judge_communication([good, bad], case_of("ZeRO 0"))
    assert (state, finding, record.only_at_boundary) == ("fail", None, False)
    assert reason.startswith("rank 1, micro-step 1")


@pytest.mark.distributed
def test_what_only_one_witness_could_see_is_untested(found: Found) -> None:
    """Right bytes, but nobody who confirms them: no pass, and no failure either."""
    traffic = found["ZeRO 0"][0]
    missed = replace(traffic, logger_bytes={"all_reduce": 4})
    passed_by = replace(traffic, past_the_logger={"control": 128, "gradient": 100})
    for each in (missed, passed_by):
        _, state, reason, _ = judge_communication([each], case_of("ZeRO 0"))
        assert (state, each.witnesses_agree) == ("untested", False), reason


@pytest.mark.distributed
def test_fewer_steps_with_the_right_total_are_untested(found: Found) -> None:
    traffic = found["ZeRO 0"][0]
    fewer = replace(traffic, measured=traffic.measured[-1:], step_calls=1)
    _, state, reason, _ = judge_communication([fewer], case_of("ZeRO 0"))
    assert (state, "cannot be told apart" in reason) == ("untested", True)


def test_nothing_measured_is_untested() -> None:
    record, state, reason, finding = judge_communication([], case_of("ZeRO 0"))
    assert (record.only_at_boundary, state, reason, finding) == (None, "untested", "no window was measured", None)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_calls_the_collectives_too(one_rank: Ranks, stage: int) -> None:
    case = case_of(f"ZeRO {stage}", ranks=1)
    traffic = traffic_of(one_rank, case)
    record, state, reason, _ = judge_communication([traffic], case)
    assert state == "pass"
    assert record.expected_gradient_bytes == 4 * PARAMETERS
    assert reason.endswith("with one rank the collectives are called, but nothing crosses a wire")
    assert pickle.loads(pickle.dumps(traffic)) == traffic


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_parameter_that_only_some_micro_steps_use(one_rank: Ranks, stage: int) -> None:
    """As an expert that gets no token: ZeRO 2 and 3 leave it out there, ZeRO 1 sends what the window gathered."""
    config = PlainCase(1, STEPS, 1, stage).config
    model = Experts()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    def window() -> None:
        for micro_step in range(STEPS):
            engine.backward(engine(torch.ones(1, 8), both=micro_step != 1))
            engine.step()

    window()
    hooks = _hooks(model)
    traffic = measure_traffic(Subject(_OnlyAnEngine(engine), one_rank, StillDog()), window)  # type: ignore[arg-type]
    assert _hooks(model) == hooks
    _, state, reason, _ = judge_communication([traffic], make_case(stage=stage, steps=STEPS))
    assert state == "pass", reason
    # fp32: 8 x 8 elements of the first expert, as many of the second one, and nothing of the third.
    assert traffic.gradient_bytes == ([0, 0, 0, 512] if stage == 1 else [512, 256, 512, 512])
    assert traffic.without_gradient == ("third.weight",)
    engine.destroy()


class Experts(nn.Module):
    """Three, of which one is used each time, one sometimes, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, rows: torch.Tensor, both: bool) -> torch.Tensor:
        rows = self.first(rows)
        return (self.second(rows) if both else rows).sum()


class _OnlyAnEngine:
    """What ``Subject`` wants of a window engine."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine


def _hooks(model: nn.Module) -> list[int]:
    return [len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters()]
