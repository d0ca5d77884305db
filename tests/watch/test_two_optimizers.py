"""Two optimizers of one model: judged together where they step together, and never called right unseen.

Run: pytest tests/watch/test_two_optimizers.py. Each mistake is the control of a right run. Not covered: two models.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.watch.running import only_window, parameters_after, watched


@pytest.mark.parametrize(
    "words", [["--clip", ""], ["--clip", "together"], ["--clip", "apart", "--clear-at-once"]], ids=" ".join
)
def test_two_that_step_together_are_right(one_rank: object, words: list[str]) -> None:
    record = watched("two_optimizers", *words)
    window = only_window(record)
    assert window.verdict == "equivalent", window.reasons
    assert window.claims.update == "pass"
    assert record.engines[0].trained_parameters == record.engines[0].model.parameters
    assert window.step.gradient_norm.clipped is not None


@pytest.mark.parametrize("words", [[], ["--clear-at-once"]], ids=["cleared after both", "cleared at once"])
def test_a_second_that_is_never_cleared_is_seen(one_rank: object, words: list[str]) -> None:
    window = only_window(watched("two_optimizers", *words, "--clip", "", "--mistake", "never-cleared"))
    assert window.verdict == "not_equivalent"
    assert window.claims.gradient == "fail"
    assert [(each.id, each.confidence) for each in window.causes] == [("stale-gradients", "certain")]
    assert "model.embed_tokens.weight" in window.causes[0].summary


@pytest.mark.parametrize("clip", ["together", "apart"])
def test_one_that_gets_less_than_clipping_left_is_seen(one_rank: object, clip: str) -> None:
    window = only_window(watched("two_optimizers", "--clip", clip, "--mistake", "shrunk"))
    assert "clipping" in window.claims.which("fail")
    cause = next(each for each in window.causes if each.id == "clipping-mismatch")
    assert "JSON" not in cause.summary + cause.fix


def test_one_that_steps_at_other_windows_is_not_called_right(one_rank: object) -> None:
    """It steps with the other in window 2 and not in window 3: what is judged in window 4 is the other alone."""
    window = only_window(watched("two_optimizers", "--second-every", "2", "--clip", "", windows=(4,)))
    assert window.verdict is None, window.reasons
    assert "not looked at" in window.reasons["gradient"]


def test_one_that_misses_the_watched_window_leaves_no_verdict(one_rank: object) -> None:
    record = watched("two_optimizers", "--second-every", "2", "--clip", "", windows=(3,))
    assert record.verdict is None
    assert any("not judged: 4,096 parameters" in message for message in record.messages)


def test_parameters_are_the_same_watched(one_rank: object, tmp_path: Path) -> None:
    words = ["--clip", "apart", "--clear-at-once"]
    plain = parameters_after("two_optimizers", words, tmp_path, watch=False)
    seen = parameters_after("two_optimizers", words, tmp_path, watch=True)
    assert all(torch.equal(plain[name], seen[name]) for name in plain)
