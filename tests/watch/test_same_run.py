"""A watched run is the same run: its parameters at the end are those of the unwatched one, to the bit, on every rank.

Run: pytest tests/watch/test_same_run.py (-m slow for two ranks: every script at every stage). Not covered: GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.watch.running import parameters_after, start_ranks

QUICK = [
    ["deepspeed_loop", "--stage", "0", "--dropout", "0.1"],
    ["deepspeed_loop", "--stage", "3", "--dtype", "bf16"],
    ["trainer", "--stage", "2", "--lora"],
    ["plain_loop", "--dropout", "0.1"],
    ["two_engines"],
    pytest.param(["accelerate_loop", "--stage", "1"], marks=pytest.mark.slow),
    pytest.param(["plain_loop", "--compile"], marks=pytest.mark.slow),
    pytest.param(["plain_loop", "--checkpointing", "--dropout", "0.1"], marks=pytest.mark.slow),
]
MISTAKES = {
    "deepspeed_loop": ["divided-twice", "step-every-nth", "zero-grad", "clip-each", "short-window", "same-data"],
    "plain_loop": ["divided-twice", "zero-grad", "clip-each", "step-each", "same-data", "always-no-sync --no-sync"],
    "trainer": ["divided-twice", "mean-of-means", "zero-grad", "clip-each"],
    "accelerate_loop": ["divided-twice", "zero-grad", "clip-each"],
}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("words", QUICK, ids=" ".join)
def test_on_one_rank(one_rank: object, words: list[str], tmp_path: Path) -> None:
    script, *flags = words
    assert same(*(parameters_after(script, flags, tmp_path, watch=watch) for watch in (False, True)))


def test_another_run_is_told_apart(one_rank: object, tmp_path: Path) -> None:
    """The control: one micro-batch less in each window."""
    plain = parameters_after("deepspeed_loop", [], tmp_path, watch=False)
    assert not same(plain, parameters_after("deepspeed_loop", ["--accumulate", "3"], tmp_path, watch=False))


def pairs_on_two_ranks(cases: Sequence[str], folder: Path) -> list[str]:
    """Runs each case unwatched and watched; those that differ on a rank."""
    runs = []
    for number, case in enumerate(cases):
        for how in ("unwatched", "watched"):
            runs.append([how, *case.split(), "--save", str(folder / f"{number}-{how}.pt")])
    start_ranks(2, runs, folder)
    differing = []
    for number, case in enumerate(cases):
        for rank in ("", ".1"):
            left = [torch.load(folder / f"{number}-{how}.pt{rank}") for how in ("unwatched", "watched")]
            if not same(*left):
                differing.append(f"{case}, rank {rank or 0}")
    return differing


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_script_at_every_stage_on_two_ranks(stage: int, tmp_path: Path) -> None:
    cases = [
        f"deepspeed_loop --stage {stage} --dropout 0.1",
        f"deepspeed_loop --stage {stage} --dtype bf16",
        f"deepspeed_loop --stage {stage} --ragged --loss tokens",
        f"trainer --stage {stage} --ragged",
        f"accelerate_loop --stage {stage}",
        f"two_engines --stage {stage}",
    ]
    assert pairs_on_two_ranks(cases, tmp_path) == []


@pytest.mark.slow
@pytest.mark.distributed
def test_scripts_without_deepspeed_on_two_ranks(tmp_path: Path) -> None:
    cases = ["plain_loop --dropout 0.1", "plain_loop --no-sync", "trainer", "accelerate_loop"]
    assert pairs_on_two_ranks(cases, tmp_path) == []


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("script", MISTAKES)
def test_scripts_with_mistakes_on_two_ranks(script: str, tmp_path: Path) -> None:
    """A wrong run is left as wrong as it is."""
    stages = {"deepspeed_loop": ["--stage 0", "--stage 2"], "trainer": ["--stage 0"], "accelerate_loop": ["--stage 1"]}
    cases = [f"{script} {stage} --mistake {each}" for stage in stages.get(script, [""]) for each in MISTAKES[script]]
    assert pairs_on_two_ranks(cases, tmp_path) == []
