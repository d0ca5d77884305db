"""The report says what the record holds, at 80 columns and without colour codes where nobody can see colours.

Run: pytest tests/report/test_terminal.py -n 0. Not covered: what it looks like on terminals of every kind.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from dsaccum.report.figures import against, middle_left_out, plain, ranges, ratio, scientific, size
from dsaccum.report.terminal import failure_text, print_report
from dsaccum.verification.records.record import Cause, Claims, GradientRecord, StepRecord, UpdateRecord, VerifyRecord
from tests.report import records

FAILED_GRADIENT = Claims(**{**dict.fromkeys(Claims.model_fields, "pass"), "gradient": "fail"})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def one_of_64_dropped() -> VerifyRecord:
    weights = records.matrix(64, 1, 1 / 64)
    weights[17] = [0.0]
    steps = [records.step(number, 64, 1) for number in (1, 3)]
    odd = records.step(2, 64, 1, micro_batch_weights=records.weights(64, 1, weights))
    return records.record(accumulation_steps=64, ranks=1, claims=FAILED_GRADIENT, steps=[steps[0], odd, steps[1]])


def one_rank_of_8_lost() -> VerifyRecord:
    weights = records.matrix(20, 8, 1 / 160)
    weights[3][5] = 0.0
    step = records.step(1, 20, 8, micro_batch_weights=records.weights(20, 8, weights))
    return records.record(accumulation_steps=20, ranks=8, claims=FAILED_GRADIENT, steps=[step])


ALL: list[Callable[[], VerifyRecord]] = [
    records.record, records.loss_scaled_twice, records.untested_update, records.ranks_not_reduced, one_of_64_dropped,
    one_rank_of_8_lost,
]  # fmt: skip


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def report(record: VerifyRecord, stream: io.StringIO | None = None) -> str:
    stream = stream or io.StringIO()
    print_report(record, stream)
    return stream.getvalue()


def lines_with(text: str, part: str) -> list[str]:
    return [line for line in text.splitlines() if part in line]


def verdict_part(text: str) -> str:
    """From the verdict on, with wrapped lines joined."""
    return " ".join(text[text.index("\nverdict ") :].split())


@pytest.mark.parametrize("case", ALL)
def test_piped_it_is_plain_and_80_wide(case: Callable[[], VerifyRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = report(case())
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert all(line == line.rstrip() for line in text.splitlines())


def test_on_a_terminal_it_is_coloured_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[1;31m" in report(records.loss_scaled_twice(), Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "31m" not in report(records.loss_scaled_twice(), Terminal())


def test_equivalent() -> None:
    text = report(records.record())
    assert text.startswith("effective batch = 2 ranks x 4 accumulation steps x 2 micro-batch = 16 samples\n")
    for part in ("GPTNeoXForCausalLM, 1,853,568 parameters", "ZeRO stage 0", "deepspeed 0.19.8", "2.1e-07 / 1.3e-06"):
        assert part in text
    assert "weights of the micro-batches  steps 1 to 3;" in text
    assert lines_with(text, "micro-step 4  0.1250  0.1250  0.1250")
    assert not set("!<") & set(text), "nothing is marked"
    assert lines_with(text, "micro-steps 1 to 3: nothing")
    assert "7,414,272 bytes" in text
    assert verdict_part(text).startswith(
        "verdict EQUIVALENT: 4 micro-batches of 2 on 2 ranks gave the update of one batch"
    )


def test_loss_scaled_twice() -> None:
    text = report(records.loss_scaled_twice())
    assert len(lines_with(text, "0.1250  0.0312  0.0312  <-- due 0.1250")) == 4
    assert len(lines_with(text, "7.5e-01 / 1.3e-06!")) == 3
    assert lines_with(text, "fault injected  loss-scaled-twice")
    assert lines_with(text, "substituted     FusedAdam")
    assert lines_with(text, "failed          gradient: every micro-batch")
    assert lines_with(text, "not tested      memory: ")
    assert lines_with(text, "not applicable  clipping: the JSON sets no limit")
    said = verdict_part(text)
    assert said.startswith("verdict NOT EQUIVALENT")
    assert said.endswith("engine.backward(loss, scale_wrt_gas=False)"), "the fix comes last"
    assert "cause loss-scaled-twice (certain)" in said


def test_of_many_micro_steps_the_odd_one_and_both_ends_are_shown() -> None:
    text = report(one_of_64_dropped())
    assert lines_with(text, "step 2; steps 1, 3 as due")
    assert lines_with(text, "micro-step 18  0.0156     0.0000  <-- due 0.0156")
    assert [line.split(" (")[1] for line in lines_with(text, "more as due")] == ["11 more as due)", "41 more as due)"]
    assert len(lines_with(text, "micro-step ")) < 20
    assert lines_with(text, "micro-step 64 ")


def test_of_many_ranks_the_odd_one_and_both_ends_are_shown() -> None:
    text = report(one_rank_of_8_lost())
    [head] = lines_with(text, "rank 0  ...")
    assert head.split() == ["due", "rank", "0", "...", "rank", "5", "...", "rank", "7"]
    assert lines_with(text, "0.00625  ...  0.00000  ...  0.00625  <-- rank 5")


def test_ranks_are_shown_one_by_one_only_where_they_differ() -> None:
    text = report(records.ranks_not_reduced())
    assert lines_with(text, "as rank 0 got it")
    assert len(lines_with(text, "0.1667  0.0000  0.3333  <-- due 0.1667")) == 3
    assert len(lines_with(text, "0.1667  0.3333  0.0000  <-- due 0.1667")) == 3
    assert "got it" not in report(records.loss_scaled_twice())
    rounding = [records.matrix(4, 2, (1 + error) / 8) for error in (-9e-7, 9e-7)]
    step = records.step(1, 4, 2, micro_batch_weights=records.weights(4, 2, rounding[0], rounding))
    assert "got it" not in report(records.record(steps=[step])), "rounding is no difference"


def test_tensors_that_are_off_are_named() -> None:
    off = records.ranks_not_reduced().steps[1].gradient
    text = report(records.record(steps=[records.step(1, 4, 2, gradient=off)]))
    assert lines_with(text, "layers.4.weight  ratio 1.3000, error 9.0e-01 / 1.0e-06")
    assert lines_with(text, "15 more in the record")


def test_tensors_are_not_named_where_the_weights_are_wrong() -> None:
    """All are off then, and the matrix says why."""
    assert "layers.4.weight" not in report(records.ranks_not_reduced())


def test_no_verdict_says_why() -> None:
    text = report(records.untested_update())
    assert "EQUIVALENT" not in text
    assert verdict_part(text) == (
        "verdict NONE, nothing is proven either way: update is untested: there is no reference for the optimizer Lion"
    )


def test_an_error_too_small_for_the_digits_shown_is_told() -> None:
    weights = records.weights(4, 1, records.matrix(4, 1, 0.25 * (1 + 2e-6)))
    step = records.step(1, 4, 1, micro_batch_weights=weights)
    text = report(records.record(ranks=1, claims=FAILED_GRADIENT, steps=[step]))
    assert len(lines_with(text, "0.2500     0.2500  <-- off by 2.0e-06")) == 4


def test_a_weight_is_judged_by_its_own_size() -> None:
    """A thousandth of the largest weight, off by a tenth: the error is far below the tolerance of the largest."""
    due, found = [[0.999], [0.001]], [[0.999], [0.0011]]
    weights = records.weights(2, 1).model_copy(
        update={"expected": due, "recovered": found, "by_rank": [found], "tolerance": 1e-3}
    )
    step = records.step(1, 2, 1, micro_batch_weights=weights)
    text = report(records.record(accumulation_steps=2, ranks=1, claims=FAILED_GRADIENT, steps=[step]))
    assert lines_with(text, "micro-step 2  0.00100    0.00110  <-- due 0.00100")
    assert len(lines_with(text, "<--")) == 1


def test_a_weight_where_nothing_is_due_is_judged_by_the_others() -> None:
    for found, is_odd in ((1e-9, False), (0.1, True)):
        recovered = [[1.0], [found]]
        weights = records.weights(2, 1).model_copy(
            update={"expected": [[1.0], [0.0]], "recovered": recovered, "by_rank": [recovered]}
        )
        step = records.step(1, 2, 1, micro_batch_weights=weights)
        assert ("<-- due 0.0000" in report(records.record(accumulation_steps=2, ranks=1, steps=[step]))) == is_odd


def test_an_error_that_is_not_finite_is_told() -> None:
    step = records.step(1, 4, 2, gradient=GradientRecord(error=float("nan"), bound=1e-6))
    assert "not finite!" in report(records.record(steps=[step]))


def test_weights_that_differ_between_ranks_have_a_due_column_each() -> None:
    due = [[0.1, 0.2], [0.3, 0.4]]
    weights = records.weights(2, 2).model_copy(update={"expected": due, "recovered": [[0.1, 0.25], [0.3, 0.4]]})
    step = records.step(1, 2, 2, micro_batch_weights=weights.model_copy(update={"by_rank": None}))
    text = report(records.record(accumulation_steps=2, claims=FAILED_GRADIENT, steps=[step]))
    [row] = lines_with(text, "micro-step 1 ")
    assert row.split() == ["micro-step", "1", "0.1000", "0.2000", "0.1000", "0.2500", "<--", "rank", "1"]


def test_weights_that_cannot_be_told_say_why() -> None:
    weights = records.weights(4, 2).model_copy(
        update={"recovered": None, "by_rank": None, "reason": "condition number 3e+07"}
    )
    step = records.step(1, 4, 2, micro_batch_weights=weights)
    assert lines_with(report(records.record(steps=[step])), "weights         not told: condition number 3e+07")


def test_a_micro_batch_without_targets_has_a_dash() -> None:
    recovered = [[1.0], [None]]
    weights = records.weights(2, 1).model_copy(
        update={"expected": [[1.0], [0.0]], "recovered": recovered, "by_rank": [recovered]}
    )
    text = report(
        records.record(accumulation_steps=2, ranks=1, steps=[records.step(1, 2, 1, micro_batch_weights=weights)])
    )
    assert lines_with(text, "micro-step 2  0.0000          -")
    assert "<--" not in text


def test_a_step_inside_the_window_is_told() -> None:
    step = records.step(1, 4, 2, optimizer_steps=[1, 2, 3, 4])
    text = report(records.record(steps=[step]))
    assert "the optimizer stepped after micro-steps 1 to 4, due after 4" in text
    skipped = report(records.record(steps=[records.step(1, 4, 2, applied=False, optimizer_steps=[])]))
    assert "DeepSpeed discarded this window" in skipped


def test_several_causes_are_numbered() -> None:
    causes = [Cause(id=name, confidence="ambiguous", summary="s", fix="f") for name in ("ranks-summed", "unknown")]
    text = report(records.record(claims=FAILED_GRADIENT, causes=causes))
    assert lines_with(text, "cause 1 of 2    ranks-summed (ambiguous)")
    assert lines_with(text, "cause 2 of 2    unknown (ambiguous)")


def test_the_worst_parameter_is_named_where_no_tensor_is_singled_out() -> None:
    update = UpdateRecord(error=1.0, bound=1e-6, ratio=2.0, worst_parameter="head.weight")
    text = report(records.record(steps=[records.step(1, 4, 2, update=update)]))
    assert lines_with(text, "worst update    head.weight, step 1")


def test_nothing_measured_is_no_error() -> None:
    text = report(records.record(steps=[StepRecord(step=1)], communication={}, memory={}, versions={}, elapsed_s=None))
    assert lines_with(text, "communication   not measured")
    assert lines_with(text, "memory          not measured")
    assert lines_with(text, "weights         not told: not measured")
    assert report(records.record(steps=[]))


def test_rich_markup_in_names_is_text() -> None:
    gradient = GradientRecord(error=1.0, bound=0.1, worst_parameter="layers[0].[red]weight[/red]")
    text = report(records.record(steps=[records.step(1, 4, 2, gradient=gradient)]))
    assert "layers[0].[red]weight[/red]" in text


def test_the_message_of_a_failed_assertion_is_the_verdict() -> None:
    text = failure_text(records.loss_scaled_twice())
    assert text.startswith("verdict         NOT EQUIVALENT")
    assert "cause           loss-scaled-twice (certain)" in text
    assert "<-- due 0.1250" in text
    assert "\x1b" not in text


def test_figures() -> None:
    assert [scientific(number) for number in (None, 0.0, 2.13e-7, 1.0)] == ["-", "0", "2.1e-07", "1.0e+00"]
    assert [against(2.1e-7, None), against(None, 1.0)] == ["2.1e-07 / -", "-"]
    assert [ratio(number) for number in (0.99999, 0.0, 1e-5, 4096.0)] == ["1.0000", "0.0000", "1.0e-05", "4.1e+03"]
    assert [plain(number, 4) for number in (1.0, 1e-9, 1e9)] == ["1.0000", "1.00e-09", "1.00e+09"]
    assert [size(amount) for amount in (1, 1023, 1536, 7_414_272, 2**50)] == [
        "1 byte", "1,023 bytes", "1.5 KiB", "7.1 MiB", "1024.0 TiB",
    ]  # fmt: skip
    assert ranges([1, 2, 3, 5, 7, 8]) == "1 to 3, 5, 7 to 8"


def test_the_middle_is_left_out_with_a_gap_wherever_something_is_missing() -> None:
    assert middle_left_out(4, 4) == [0, 1, 2, 3]
    assert middle_left_out(10, 4) == [0, 1, None, 8, 9]
    assert middle_left_out(10, 4, keep=[5]) == [0, 1, None, 5, None, 9]
    assert middle_left_out(10, 1) == [0, None]
