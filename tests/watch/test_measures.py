"""What a watched window communicates and what it keeps alive: right loops pass, and what costs more is named.

Run: pytest tests/watch/test_measures.py. Bytes are those of the model's parameters, counted here. Not covered: GPUs,
communication hooks of DDP, several engines' memory (which is not told).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dsaccum.instruments.collectives import MicroStepTraffic
from dsaccum.verification.records.watch import WindowRecord
from dsaccum.watch.communication import judge_communication
from dsaccum.watch.measuring import Measured
from dsaccum.watch.window import RankWindow, RunFacts, WatchedWindow
from tests.watch.running import SCRIPTS, on_ranks, only_window, watched

PARAMETERS = 28_032
"""Of toy_data.gpt2: 64 x 32 + 16 x 32 embeddings, two blocks of 12,704, and 64 of the last norm."""
WHOLE = 4 * PARAMETERS


def gradient_bytes(window: WindowRecord) -> list[int | None]:
    return [each.gradient_bytes for each in window.communication.per_micro_step]


@pytest.mark.parametrize(
    ("stage", "due"),
    [(0, [0, 0, 0, WHOLE]), (1, [0, 0, 0, WHOLE]), (2, [WHOLE] * 4), (3, [WHOLE] * 4)],
)
def test_each_micro_steps_gradient_bytes(one_rank: object, stage: int, due: list[int]) -> None:
    """One rank calls the collectives, too. The norm's 4 bytes are control traffic, and none of it is the watch's."""
    window = only_window(watched("deepspeed_loop", "--stage", str(stage)))
    assert gradient_bytes(window) == due
    assert window.claims.communication == "pass"
    assert window.communication.only_at_boundary == (stage < 2)
    assert window.communication.expected_gradient_bytes == WHOLE
    control = [each.control_bytes for each in window.communication.per_micro_step]
    assert control == [0, 0, 0, 4 if stage < 3 else 8]


@pytest.mark.parametrize("how", ["reduce-each", "reduce-by-hand"])
def test_reducing_at_every_micro_step_is_named(one_rank: object, how: str) -> None:
    """By the engine's own function, and by the script: there gradients are known by where they lie, not by size."""
    window = only_window(watched("deepspeed_loop", "--mistake", how))
    assert [(each.id, each.confidence) for each in window.causes] == [("reduced-every-micro-step", "certain")]
    assert (window.claims.weighting, window.claims.gradient, window.claims.communication) == ("pass", "pass", "fail")
    assert gradient_bytes(window)[:3] == [WHOLE] * 3


@pytest.mark.parametrize(
    ("stage", "seen", "state"),
    [
        (0, [0, 0, WHOLE], "pass"),
        (0, [WHOLE, WHOLE, WHOLE], "fail"),
        (1, [64, 64, WHOLE + 64], "untested"),  # batch statistics
        (1, [0, 0, WHOLE - 4], "untested"),
        (0, [0, 0, 0], "untested"),
        (2, [WHOLE, WHOLE, WHOLE], "pass"),
    ],
)
def test_only_a_whole_gradient_before_the_boundary_fails(stage: int, seen: list[int], state: str) -> None:
    """Whatever else is reduced in a backward pass is no proof of a mistake."""
    traffic = [MicroStepTraffic(k, {}, size) for k, size in enumerate(seen, start=1)]
    due = [WHOLE] * 3 if stage == 2 else [0, 0, WHOLE]
    rank = RankWindow(0, columns=[{}] * 3, measured=Measured(traffic), expected_gradient_bytes=due)
    facts = RunFacts("DeepSpeed", "", "", 1, 1, stage, "fp32", "fp32", "fp32", 3, 2, 0.0, 3)
    assert judge_communication(WatchedWindow(facts, [rank]), boundary_right=True)[0] == state


def test_one_process_has_nothing_to_communicate(one_rank: object) -> None:
    window = only_window(watched("plain_loop"))
    assert window.claims.communication == "not_applicable"
    assert window.claims.memory == "pass"


@pytest.mark.parametrize(
    ("words", "share"),
    [
        (["plain_loop", "--mistake", "keep-graphs"], 0.9),
        (["plain_loop", "--mistake", "keep-graphs", "--ragged", "--loss", "tokens"], 0.9),
        (["plain_loop", "--mistake", "keep-logits"], 0.03),
        (["deepspeed_loop", "--mistake", "keep-graphs"], 0.9),
        (["deepspeed_loop", "--mistake", "keep-graphs", "--stage", "2"], 0.9),
        pytest.param(["deepspeed_loop", "--mistake", "keep-graphs", "--stage", "1"], 0.9, marks=pytest.mark.slow),
        pytest.param(["deepspeed_loop", "--mistake", "keep-graphs", "--stage", "3"], 0.9, marks=pytest.mark.slow),
    ],
)
def test_what_is_kept_is_named(one_rank: object, words: list[str], share: float) -> None:
    """Nearly all of a micro-batch's activations where graphs are kept; of logits a small part."""
    window = only_window(watched(*words))
    assert [(each.id, each.confidence) for each in window.causes] == [("activations-kept", "certain")]
    assert window.claims.gradient == "pass"
    evidence = window.causes[0].evidence
    assert share <= evidence["bytes_per_micro_step"] / evidence["activation_bytes"] <= 1.0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_right_loops_keep_nothing(one_rank: object, stage: int) -> None:
    """Losses are kept in plain_loop's list, above, with graphs that backward has freed: 4 bytes each."""
    memory = only_window(watched("deepspeed_loop", "--stage", str(stage))).memory
    assert len(memory.per_micro_step) == 4
    assert memory.growth_bytes == 0
    activations = {each.activation_bytes for each in memory.per_micro_step[1:]}
    assert len(activations) == 1


def test_two_micro_steps_show_no_growth(one_rank: object) -> None:
    window = only_window(watched("deepspeed_loop", "--accumulate", "2"))
    assert window.claims.memory == "untested"
    assert window.verdict == "equivalent"


def test_the_toy_model_is_as_large_as_said_here() -> None:
    import sys

    sys.path.insert(0, str(SCRIPTS))
    try:
        from toy_data import gpt2
    finally:
        sys.path.remove(str(SCRIPTS))
    assert sum(p.numel() for p in gpt2().parameters()) == PARAMETERS


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks(tmp_path: Path) -> None:
    """ZeRO 3 hands in padded parameters. DDP that is not told to wait is right, and a note says what it costs."""
    cases = {
        "deepspeed_loop --stage 1": [0, 0, 0, WHOLE],
        "deepspeed_loop --stage 2": [WHOLE] * 4,
        "deepspeed_loop --stage 3": [WHOLE] * 4,
        "plain_loop --no-sync": [0, 0, 0, WHOLE],
        "plain_loop": [WHOLE] * 4,
        "trainer": None,
    }
    for case, record in zip(cases, on_ranks(2, [case.split() for case in cases], tmp_path), strict=True):
        window = only_window(record)
        assert window.verdict == "equivalent", (case, window.reasons)
        assert (window.claims.communication, window.claims.memory) == ("pass", "pass"), (case, window.reasons)
        assert cases[case] in (None, gradient_bytes(window)), case
        costly = any(note.startswith("reduced-every-micro-step") for note in window.notes)
        assert costly == (case == "plain_loop"), (case, window.notes)
        assert window.communication.only_at_boundary == (sum(map(bool, gradient_bytes(window))) == 1)
