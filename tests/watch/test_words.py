"""What reports of watched windows say beside figures. Run: pytest tests/watch/test_words.py.

Not covered: terminals' widths and colours, which tests/report covers.
"""

from __future__ import annotations

import io
import re
from typing import Any

from dsaccum.instruments.collectives import MicroStepTraffic
from dsaccum.report.watch import print_watch
from dsaccum.watch.communication import judge_communication
from dsaccum.watch.measuring import Measured
from dsaccum.watch.session import Session
from dsaccum.watch.window import WatchedWindow
from tests.report import watch_records
from tests.watch.made_windows import described_window, made_window, printed


def without_tokens() -> WatchedWindow:
    return made_window([1.0] * 4, rank={"tokens": [None] * 4})


def test_errors_stand_beside_bounds_by_name() -> None:
    text = printed(made_window([0.25] * 4))
    assert re.search(r"off by \S+, bound \S+\n", text)
    assert re.search(r"gradient +error \S+, bound \S+, residual", text)


def test_weights_without_tokens_are_no_approval() -> None:
    said = "relative to what arrived at the losses: whether they were divided by N isn't seen"
    assert said in printed(without_tokens())
    assert "script not seen" in printed(without_tokens())
    assert said not in printed(made_window([0.25] * 4))


def test_what_the_truth_was_computed_in_is_a_sentence() -> None:
    assert "truth           in float32: the model does not run in float64" in printed(
        made_window([0.25] * 4, rank={"truth": "float32"})
    )


def test_one_of_several_engines_is_called_by_its_name() -> None:
    both, alone = io.StringIO(), io.StringIO()
    print_watch(watch_records.right(), both, several=True)
    print_watch(watch_records.right(), alone)
    assert "dsaccum.watch: window 3 of engine 1, GPT2LMHeadModel\n" in both.getvalue()
    assert "dsaccum.watch: window 3\n" in alone.getvalue()


def test_a_session_of_several_says_so(capsys: Any) -> None:
    """Each window is printed when it is judged, by itself."""
    session = Session()
    session.desk.subjects = 2
    session._found(made_window([0.25] * 4))
    session.end()
    assert "window 3 of engine 1, Net" in capsys.readouterr().err


def test_a_weight_that_is_not_due_shows_by_what_factor() -> None:
    window = made_window([0.255, 0.25, 0.25, 0.25], [[[0.5, 0.5]] * 4] * 2, ranks=2, facts={"kind": "DDP"})
    counts = [[10, 30], [20, 20], [20, 20], [20, 20]]
    for r, rank in enumerate(window.ranks):
        for k, reading in enumerate(rank.tokens):
            assert reading is not None
            each = reading.sum / counts[k][r]
            rank.tokens[k] = type(reading)(
                **{**reading.__dict__, "weights": [each] * counts[k][r], "due": counts[k][r]}
            )
    text = printed(window)
    assert "<-- 0.68 to 2.04 x due" in text
    assert "not as due" not in text


def test_how_many_micro_batches_were_seen_where_nobody_says() -> None:
    for earlier, said in [
        ((), "4 seen"),
        ((4,), "4 seen, as in the one before"),
        ((4, 6), "4 seen, 6 in the one before"),
    ]:
        window = described_window(made_window([0.25] * 4, facts={"earlier_windows": earlier}))
        assert window.reasons["boundary"] == f"nobody says how many micro-batches make a window; {said}"


def traffic(*gradients: int, control: int = 0) -> Measured:
    return Measured([MicroStepTraffic(k, {}, size, 0, control) for k, size in enumerate(gradients, start=1)])


def test_ranks_that_were_not_averaged_at_the_end_do_not_pass_as_having_communicated() -> None:
    facts = {"kind": "DDP"}
    for sizes, state in [((384, 384, 384, 0), "untested"), ((0, 0, 0, 384), "pass"), ((384, 384, 384, 384), "pass")]:
        rank = {"measured": traffic(*sizes), "expected_gradient_bytes": list(sizes)}
        window = made_window([0.25] * 4, ranks=2, facts=facts, rank=rank)
        assert judge_communication(window, boundary_right=True)[0] == state
        noted = [note for note in described_window(window).notes if note.startswith("reduced-every")]
        assert bool(noted) == (sizes[0] > 0 and sizes[3] > 0)


def test_what_other_engines_reduce_is_told() -> None:
    alone, other = traffic(0, 0, 0, 384, control=4000), traffic(0, 0, 0, 384, control=4000)
    other.others = True
    notes = [described_window(made_window([0.25] * 4, rank={"measured": each})).notes for each in (alone, other)]
    assert notes[0] == []
    assert notes[1] == ["several models are trained in this process: control traffic holds the gradients of the others"]
