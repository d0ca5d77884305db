"""Scripts on Trainer, Accelerate, plain PyTorch and two engines, watched: right ones pass, each mistake is named.

Run: pytest tests/watch/test_frameworks.py. Right and wrong runs of one script are each other's control. Not covered:
TRL, Lightning and peft, which are not installed; LoRA is a layer of our own here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsaccum.report.watch import verdict_text
from tests.watch.running import on_ranks, only_window, watched

LABELS_OF_A_ROW = 16
RIGHT = {
    "Trainer": ["trainer"],
    "Trainer, ZeRO 0, evaluation": ["trainer", "--stage", "0", "--evaluate"],
    "Trainer, ZeRO 2, ragged": ["trainer", "--stage", "2", "--ragged"],
    "Trainer, ZeRO 3": ["trainer", "--stage", "3"],
    "Trainer, ZeRO 2, LoRA": ["trainer", "--stage", "2", "--lora"],
    "Accelerate": ["accelerate_loop"],
    "Accelerate, ZeRO 2": ["accelerate_loop", "--stage", "2"],
    "plain": ["plain_loop"],
    "plain, ragged by tokens": ["plain_loop", "--ragged", "--loss", "tokens"],
    "plain, dropout, checkpointing": ["plain_loop", "--dropout", "0.1", "--checkpointing"],
}
WRONG = {
    "Trainer divided twice": (["trainer", "--mistake", "divided-twice"], "loss-scaled-twice"),
    "Trainer mean of means": (["trainer", "--ragged", "--mistake", "mean-of-means"], "mean-of-means"),
    "Trainer padding": (["trainer", "--ragged", "--mistake", "padding-counted"], "padding-counted"),
    "Trainer cleared": (["trainer", "--mistake", "zero-grad"], "only-last-micro-batch"),
    "Trainer clipped each time": (["trainer", "--mistake", "clip-each"], "clipped-every-micro-step"),
    "Accelerate divided twice": (["accelerate_loop", "--mistake", "divided-twice"], "loss-scaled-twice"),
    "Accelerate mean of means": (["accelerate_loop", "--stage", "0", "--ragged"], "mean-of-means"),
    "Accelerate padding": (["accelerate_loop", "--ragged", "--mistake", "padding-counted"], "padding-counted"),
    "Accelerate cleared": (["accelerate_loop", "--mistake", "zero-grad"], "only-last-micro-batch"),
    "plain divided twice": (["plain_loop", "--mistake", "divided-twice"], "loss-scaled-twice"),
    "plain not divided": (["plain_loop", "--mistake", "not-divided"], "loss-not-scaled"),
    "plain cleared": (["plain_loop", "--mistake", "zero-grad"], "only-last-micro-batch"),
    "plain clipped each time": (["plain_loop", "--mistake", "clip-each"], "clipped-every-micro-step"),
    "plain stepped each time": (["plain_loop", "--mistake", "step-each"], "step-inside-window"),
    "plain mean of means": (["plain_loop", "--ragged"], "mean-of-means"),
    "plain padding": (["plain_loop", "--ragged", "--mistake", "padding-counted"], "padding-counted"),
}

SLOW = {
    "Trainer, ZeRO 0, evaluation",
    "Trainer, ZeRO 2, ragged",
    "Trainer, ZeRO 3",
    "Trainer clipped each time",
    "Accelerate, ZeRO 2",
    "Trainer mean of means",
    "Accelerate mean of means",
    "Accelerate padding",
    "plain, dropout, checkpointing",
    "Accelerate divided twice",
    "Accelerate cleared",
    "plain divided twice",
    "plain cleared",
    "plain mean of means",
    "plain padding",
}


def cases_of(table: dict[str, Any]) -> list[Any]:
    """Those of ``SLOW`` only with -m slow: what they hold, others hold, too."""
    return [
        pytest.param(case, id=name, marks=[pytest.mark.slow] if name in SLOW else []) for name, case in table.items()
    ]


@pytest.mark.parametrize("words", cases_of(RIGHT))
def test_right_scripts_pass(one_rank: object, words: list[str]) -> None:
    window = only_window(watched(*words))
    assert window.verdict == "equivalent", window.reasons
    assert not window.causes


@pytest.mark.parametrize("case", cases_of(WRONG))
def test_mistakes_are_named(one_rank: object, case: tuple[list[str], str]) -> None:
    words, cause = case
    window = only_window(watched(*words))
    assert window.verdict == "not_equivalent"
    assert [(each.id, each.confidence) for each in window.causes] == [(cause, "certain")]


@pytest.mark.parametrize("stage", [pytest.param("-1", marks=pytest.mark.slow), "0"])
def test_trainer_counts_a_gpt2s_targets_before_the_shift(one_rank: object, stage: str) -> None:
    """Nobody's mistake in the script: 16 labels are counted, 15 are targets. A Llama, above, is counted right."""
    record = watched("trainer", "--model", "gpt2", "--stage", stage)
    window = only_window(record)
    assert [each.id for each in window.causes] == ["targets-counted-before-shift"]
    assert window.token_weights.sum == pytest.approx((LABELS_OF_A_ROW - 1) / LABELS_OF_A_ROW, rel=1e-6)
    assert "collator" in window.causes[0].fix
    assert record.engines[0].framework == "Trainer"
    mended = only_window(watched("trainer", "--model", "gpt2", "--stage", stage, "--mend"))
    assert mended.verdict == "equivalent"
    assert mended.token_weights.targets == window.token_weights.targets


@pytest.mark.parametrize(
    ("words", "cause", "in_fix", "in_summary"),
    [
        (["trainer", "--mistake", "ignores-num-items"], "loss-not-scaled", "num_items_in_batch", ""),
        (["accelerate_loop", "--mistake", "unprepared"], "step-inside-window", "prepare()", "Accelerate was told"),
    ],
)
def test_fixes_are_in_terms_of_the_framework(
    one_rank: object, words: list[str], cause: str, in_fix: str, in_summary: str
) -> None:
    window = only_window(watched(*words))
    assert [(each.id, each.confidence) for each in window.causes] == [(cause, "certain")]
    assert in_fix in window.causes[0].fix
    assert in_summary in window.causes[0].summary
    assert window.effective_batch.configured_accumulation_steps == 4


def test_no_weights_are_spoken_of_where_none_are_shown(one_rank: object) -> None:
    """Parameters changed within the window: no weighting of the micro-batches gives this gradient."""
    window = only_window(watched("plain_loop", "--mistake", "swapped"))
    assert window.verdict == "not_equivalent"
    assert window.step.micro_batch_weights.recovered is None
    [cause] = window.causes
    assert "weights above" not in cause.fix
    assert "let nothing write to the parameters" in cause.fix


def test_one_micro_batch_is_and_two_are(one_rank: object) -> None:
    one = verdict_text(only_window(watched("accelerate_loop", "--mistake", "unprepared")))
    assert "1 micro-batch on 1 rank is not" in one
    assert "4 micro-batches on 1 rank are not" in verdict_text(
        only_window(watched("plain_loop", "--mistake", "not-divided"))
    )


@pytest.mark.parametrize("words", [["trainer"], ["accelerate_loop"]])
def test_frameworks_say_how_many_micro_batches_make_a_window(one_rank: object, words: list[str]) -> None:
    assert only_window(watched(*words)).claims.boundary == "pass"
    assert only_window(watched("plain_loop")).claims.boundary == "not_applicable"  # nobody does


def test_a_divisor_that_counts_prompts_is_recognised(one_rank: object) -> None:
    """No mistake with a name of its own: the divisor is found among what can be counted."""
    words = ["plain_loop", "--ragged", "--loss", "tokens", "--prompt", "3"]
    right = only_window(watched(*words))
    assert right.verdict == "equivalent", right.reasons
    wrong = only_window(watched(*words, "--mistake", "prompts-counted"))
    [cause] = wrong.causes
    targets, weight = wrong.token_weights.targets, wrong.token_weights.sum
    assert targets == right.token_weights.targets
    assert weight is not None
    assert cause.evidence["divided_by"] == {"the sum of attention_mask in the window": round(targets / weight)}
    assert "attention_mask" in cause.summary


def test_two_engines_are_judged_each_by_itself(one_rank: object) -> None:
    """The actor has two forwards in each micro-step, the critic no tokens but rows; only the critic is wrong."""
    right = watched("two_engines", "--stage", "0")
    assert [engine.windows[0].verdict for engine in right.engines] == ["equivalent", "equivalent"]
    wrong = watched("two_engines", "--stage", "2", "--mistake", "critic-divided-twice")
    assert [engine.windows[0].verdict for engine in wrong.engines] == ["equivalent", "not_equivalent"]
    assert [each.id for each in wrong.engines[1].windows[0].causes] == ["loss-scaled-twice"]


def test_a_short_last_window_with_the_full_divisor(one_rank: object) -> None:
    """Epochs of 6 micro-batches, N = 4: windows 2 and 4 are short. Divided by what they hold, they are right."""
    record = watched("plain_loop", "--rows", "12", "--mistake", "full-divisor", windows=(3, 4))
    full, short = record.engines[0].windows
    assert full.verdict == "equivalent"
    assert [(each.id, each.confidence) for each in short.causes] == [("short-window-full-divisor", "certain")]
    right = watched("plain_loop", "--rows", "12", windows=(3, 4))
    assert [window.verdict for window in right.engines[0].windows] == ["equivalent", "equivalent"]


def test_a_short_first_window_may_also_be_divided_twice(one_rank: object) -> None:
    """Window 2 is short, and nothing was seen before it: 1/2 in all fits both."""
    window = only_window(watched("plain_loop", "--rows", "12", "--mistake", "full-divisor", windows=(2,)))
    assert {each.id for each in window.causes} == {"loss-scaled-twice", "short-window-full-divisor"}
    assert {each.confidence for each in window.causes} == {"ambiguous"}


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks(tmp_path: Path) -> None:
    cases = {
        "plain_loop": "",
        "plain_loop --no-sync": "",
        "plain_loop --no-sync --ragged --loss tokens": "",
        "plain_loop --no-sync --mistake always-no-sync": "ranks-not-reduced",
        "plain_loop --mistake same-data": "ranks-share-data",
        "plain_loop --mistake clip-each": "clipped-every-micro-step",
        "plain_loop --ragged": "mean-of-means",
        "trainer --stage 1": "",
        "trainer --stage 2 --ragged": "",
    }
    records = on_ranks(2, [case.split() for case in cases], tmp_path)
    for (case, cause), record in zip(cases.items(), records, strict=True):
        window = only_window(record)
        assert [each.id for each in window.causes] == ([cause] if cause else []), (case, window.reasons)
        assert window.verdict == ("not_equivalent" if cause else "equivalent"), (case, window.reasons)
        reduces_often = case.startswith("plain_loop") and "--no-sync" not in case
        assert bool(window.notes) == reduces_often, (case, window.notes)
