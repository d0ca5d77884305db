"""Gradients that a script multiplies by one factor after backward: right where the tokens weigh 1 in the end.

Run: pytest tests/watch/test_after_backward.py. Each mistake is the control of a right run of the same script. Not
covered: fp16, whose scaler skips steps.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.watch.running import on_ranks, only_window, watched

RIGHT = {
    "divided by tokens": ["--how", "tokens"],
    "divided by tokens, clipped": ["--how", "tokens", "--clip", "0.05"],
    "scaler": ["--how", "scaler"],
    "scaler, unscaled and clipped": ["--how", "scaler", "--clip", "0.05"],
}


@pytest.mark.parametrize("words", [pytest.param(words, id=name) for name, words in RIGHT.items()])
def test_a_common_factor_that_makes_the_tokens_weigh_one_is_right(one_rank: object, words: list[str]) -> None:
    window = only_window(watched("after_backward", *words))
    assert window.verdict == "equivalent", window.reasons
    assert window.divided_by.after_backward is not None
    assert window.divided_by.script is not None
    assert window.divided_by.ranks == pytest.approx(1.0, rel=1e-5)
    whole = window.divided_by.after_backward * window.divided_by.script * window.effective_batch.accumulation_steps
    assert whole == pytest.approx(1.0, rel=1e-5)


def test_a_common_factor_that_does_not_is_wrong_by_its_tokens(one_rank: object) -> None:
    window = only_window(watched("after_backward", "--mistake", "half"))
    assert window.claims.which("fail") == ["weighting"]
    assert window.token_weights.sum == pytest.approx(2.0, rel=1e-5)


def test_a_factor_that_one_tensor_misses_is_no_common_one(one_rank: object) -> None:
    window = only_window(watched("after_backward", "--mistake", "all-but-one"))
    assert window.verdict == "not_equivalent"
    assert [each.id for each in window.causes] == ["parameter-gradient-lost"]


@pytest.mark.parametrize("how", ["tokens", "scaler"])
def test_micro_batches_lost_are_seen_under_a_factor(one_rank: object, how: str) -> None:
    window = only_window(watched("after_backward", "--how", how, "--mistake", "cleared"))
    assert window.verdict == "not_equivalent"
    assert {"weighting", "gradient"} <= set(window.claims.which("fail"))


def test_without_tokens_a_factor_is_told_and_not_judged(one_rank: object) -> None:
    window = only_window(watched("after_backward", "--loss", "squares"))
    assert (window.verdict, window.claims.gradient, window.causes) == (None, "untested", [])
    assert "multiplied by" in window.reasons["gradient"]
    lost = only_window(watched("after_backward", "--loss", "squares", "--mistake", "cleared"))
    assert lost.claims.gradient == "fail"
    assert [each.id for each in lost.causes] != ["ranks-not-reduced"]


@pytest.mark.parametrize(("how", "said"), [("tokens", "divide the gradients before"), ("scaler", "scaler.unscale_")])
def test_clipping_what_is_not_yet_normalised_is_named(one_rank: object, how: str, said: str) -> None:
    """The limit acts on another gradient than the optimizer's; with a limit that acts on neither, nothing is wrong."""
    window = only_window(watched("after_backward", "--how", how, "--clip", "0.05", "--mistake", "clipped-first"))
    assert window.claims.which("fail") == ["clipping"], window.reasons
    assert [(each.id, each.confidence) for each in window.causes] == [("clipping-mismatch", "certain")]
    assert said in window.causes[0].fix
    assert window.token_weights.sum == pytest.approx(1.0, rel=1e-5)
    loose = only_window(watched("after_backward", "--how", how, "--clip", "1e9", "--mistake", "clipped-first"))
    assert loose.verdict == "equivalent", loose.reasons


def test_parameters_that_change_inside_the_window_are_told(one_rank: object) -> None:
    """Written through ``.data``, which counts no version up; put back at once, they are the same."""
    window = only_window(watched("after_backward", "--mistake", "swapped"))
    assert window.verdict == "not_equivalent"
    [cause] = window.causes
    assert (cause.id, cause.evidence["micro_step"]) == ("unknown-difference", 3)
    assert "micro-step 3 ran with another transformer.wte.weight" in cause.summary
    right = only_window(watched("after_backward", "--mistake", "swapped-back"))
    assert right.verdict == "equivalent", right.reasons


def test_a_step_after_the_one_that_reduces_is_named(tmp_path: Path) -> None:
    right, late = on_ranks(2, [["late_step"], ["late_step", "--late", "1"]], tmp_path)
    assert only_window(right).verdict == "equivalent", only_window(right).reasons
    [cause] = only_window(late).causes
    assert (cause.id, cause.confidence, cause.evidence["reduced_after"]) == ("boundary-shifted", "certain", 3)
