"""A bare DeepSpeed loop, watched: right ones pass at every stage, and each mistake is caught and named.

Run: pytest tests/watch/test_deepspeed_loops.py. Every case beside the mistakes is their control. Not covered: GPUs,
fp16, offload.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.watch.running import on_ranks, only_window, watched

RIGHT = {
    "zero 0": ["--stage", "0"],
    "zero 1": ["--stage", "1"],
    "zero 2, dropout": ["--stage", "2", "--dropout", "0.1"],
    "zero 3, ragged": ["--stage", "3", "--ragged", "--loss", "tokens"],
    "zero 1, bf16": ["--stage", "1", "--dtype", "bf16"],
}
WRONG = {
    "divided-twice": (["--mistake", "divided-twice"], "loss-scaled-twice"),
    "step-every-nth": (["--mistake", "step-every-nth", "--updates", "3"], "boundary-shifted"),
    "zero-grad": (["--mistake", "zero-grad"], "only-last-micro-batch"),
    "mean of means": (["--ragged", "--loss", "outside"], "mean-of-means"),
    "padding": (["--ragged", "--mistake", "padding-counted"], "padding-counted"),
    "before shift": (["--ragged", "--loss", "tokens", "--mistake", "before-shift"], "targets-counted-before-shift"),
    "clipped each time": (["--mistake", "clip-each"], "clipped-every-micro-step"),
    "bf16 at ZeRO 0": (["--dtype", "bf16"], "optimizer-count-offset"),
}


@pytest.mark.parametrize("words", RIGHT.values(), ids=RIGHT)
def test_right_loops_pass(one_rank: object, words: list[str]) -> None:
    window = only_window(watched("deepspeed_loop", *words))
    assert window.verdict == "equivalent", window.reasons
    assert not window.causes
    assert window.divided_by.engine == pytest.approx(0.25)
    assert window.claims.which("untested") == []


@pytest.mark.parametrize(("words", "cause"), WRONG.values(), ids=WRONG)
def test_mistakes_are_named(one_rank: object, words: list[str], cause: str) -> None:
    window = only_window(watched("deepspeed_loop", *words))
    assert window.verdict == "not_equivalent"
    assert [(each.id, each.confidence) for each in window.causes] == [(cause, "certain")]


def test_a_short_window_with_the_full_divisor(one_rank: object) -> None:
    """The boundary is set by hand at the end of an epoch of 6 micro-batches: window 2 holds two, divided by N = 4."""
    record = watched("deepspeed_loop", "--mistake", "short-window", windows=(2, 3))
    short, full = record.engines[0].windows
    assert [(each.id, each.confidence) for each in short.causes] == [("short-window-full-divisor", "certain")]
    assert short.token_weights.sum == pytest.approx(0.5, rel=1e-6)
    assert full.verdict == "equivalent"


def test_weights_say_who_divided(one_rank: object) -> None:
    """The script's own division by N = 4 and the engine's are told apart; both are exact in binary."""
    window = only_window(watched("deepspeed_loop", "--mistake", "divided-twice"))
    assert window.divided_by.script == pytest.approx(0.25, rel=1e-6)
    assert window.divided_by.engine == 0.25
    assert window.divided_by.ranks == pytest.approx(1.0, rel=1e-6)
    assert window.token_weights.sum == pytest.approx(0.25, rel=1e-6)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks(tmp_path: Path) -> None:
    cases = [
        ["deepspeed_loop", "--stage", "0"],
        ["deepspeed_loop", "--stage", "1", "--ragged", "--loss", "tokens"],
        ["deepspeed_loop", "--stage", "2", "--dropout", "0.1"],
        ["deepspeed_loop", "--stage", "3", "--dtype", "bf16"],
        ["deepspeed_loop", "--mistake", "same-data"],
        ["deepspeed_loop", "--mistake", "no-sync"],
        ["deepspeed_loop", "--stage", "1", "--ragged", "--loss", "outside"],
        ["deepspeed_loop", "--stage", "2", "--mistake", "divided-twice"],
    ]
    named = ["", "", "", "", "ranks-share-data", "ranks-not-reduced", "mean-of-means", "loss-scaled-twice"]
    for record, cause in zip(on_ranks(2, cases, tmp_path), named, strict=True):
        window = only_window(record)
        assert [each.id for each in window.causes] == ([cause] if cause else []), window.reasons
        assert window.verdict == ("not_equivalent" if cause else "equivalent"), window.reasons
