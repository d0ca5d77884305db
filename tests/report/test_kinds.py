"""Pages of faults, audit, bench, plans, training runs and any other record; and of many records at once.

Run: pytest tests/report/test_kinds.py -n 0. Not covered: how they look (tests/report/test_browser.py).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest

from dsaccum.records import Record
from dsaccum.report.html import as_html, as_one_page, plan_drawings, run_drawings
from dsaccum.report.html.conclusions import BY_SCHEMA
from dsaccum.report.html.page import TEMPLATES
from dsaccum.report.train_run import TrainStep
from tests.report import kinds, records, watch_records
from tests.report.pages import Page

RECORDS: dict[str, tuple[Callable[[], Record], str]] = {
    "faults caught": (lambda: kinds.faults(sound=True), "right"),
    "faults missed": (lambda: kinds.faults(sound=False), "wrong"),
    "audit right": (lambda: kinds.audit(good=True), "right"),
    "audit wrong": (lambda: kinds.audit(good=False), "wrong"),
    "audit of one's own": (kinds.own_audit, "wrong"),
    "bench accepted": (kinds.bench, "right"),
    "bench rejected": (lambda: kinds.bench("reject"), "wrong"),
    "bench undecided": (lambda: kinds.bench(None, candidates=[]), "open"),
    "run finished": (kinds.train, "right"),
    "run failed": (lambda: kinds.train("failed", reason="rank 1 was killed"), "wrong"),
    "run begun": (lambda: kinds.train("running", steps=0), "open"),
    "plan that fits": (kinds.plan, "right"),
    "plan that does not fit": (lambda: kinds.plan(memory=2**33, other_memory=2**34), "wrong"),
    "plan of which nothing fits": (lambda: kinds.plan(memory=2**33, deepspeed=None), "wrong"),
    "other": (kinds.other, "wrong"),
}
"""With the colour of each one's conclusion."""


@functools.cache
def page_of(name: str) -> Page:
    return Page(as_html(RECORDS[name][0]()))


def words(name: str) -> str:
    return re.sub(r"\s+", " ", page_of(name).shown.partition("The record as JSON")[0])


@pytest.mark.parametrize("name", RECORDS)
def test_a_page_is_whole_and_its_conclusion_comes_first(name: str) -> None:
    found = page_of(name)
    assert not {"script", "link", "img", "iframe"} & set(found.tags)
    assert {target[1:] for target in found.targets} <= set(found.ids), "links lead within the page"
    assert len(found.ids) == len(set(found.ids))
    assert f'class="verdict {RECORDS[name][1]}"' in found.source
    assert found.tags.index("h1") < found.tags.index("h2")
    assert not re.search(r"\bNone\b|\bnan\b|\binf\b|Undefined|<built-in|object at", words(name))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("faults missed", "NOT SOUND: 4 of 5 faults were caught, 30.0% rightly named"),
        ("faults missed", "stale-gradients (W = 2, N = 3, ZeRO 3, packed rows): misnamed, called other"),
        ("faults missed", "ranks-summed (W = 2, N = 3, ZeRO 1, packed rows): unnamed; nobody knows it"),
        ("faults caught", "loss-scale-not-applied: fp32 has no loss scale"),
        ("audit wrong", "WRONG: of 6 cells, 2 right, 1 right, with more communication than is due, 1 wrong, 1 refused"),
        ("audit wrong", "A loss-scaled-twice two layers divide by"),
        ("audit wrong", "flag; ZeRO 0 (1 cell)"),
        ("audit wrong", "sync at ZeRO 2AssertionError: no_sync is incompatible"),
        ("audit wrong", "clipping off: rank 1 hangs"),
        ("audit of one's own", "NOT GOOD: ds.json (ZeRO 1, fp32, AdamW, N = 4, clipping off)"),
        ("bench accepted", "ACCEPT: N = 2: the same update with 15.0 MiB less memory"),
        ("bench accepted", '"bf16" halves them'),
        ("bench accepted", "differs: loss-scaled-twice"),
        ("bench accepted", "N = 8rank 1 was killed (signal 9)"),
        ("run finished", "FINISHED: 12 steps, loss 6.000 to 0.500, held out 0.510"),
        ("run finished", "step 5: the gradient was not finite"),
        ("run failed", "rank 1 was killed"),
        ("run begun", "RUNNING, or killed: no step yet"),
        ("plan that fits", "FITS: ZeRO 0, fp32: 2 ranks x 2 steps x 4 micro-batch = 16; 24.0 GiB of 25.0 GiB"),
        ("plan that fits", "What helps: a smaller reduce bucket"),
        ("plan that fits", "next deepspeed --num_gpus 2 launch/train.py --deepspeed out.json --experiment gpt2.yaml"),
        ("plan that fits", "too large 8 1 36.0 GiB backward fits 4 2 24.0 GiB backward"),
        ("plan that fits", "planned 0 fp32 off 4 2 24.0 GiB x1.00 4.0 GiB 0 bytes"),
        ("plan that does not fit", "DOES NOT FIT: ZeRO 0, fp32 lacks 7.0 GiB on each rank, even with B = 1; "
                                   "ZeRO 3, fp32, activation checkpointing would fit"),
        ("plan that does not fit", "Nearest that fits: ZeRO 3, fp32, activation checkpointing"),
        ("plan that does not fit", "lacks 7.0 GiB 1 fp32 off - - 15.0 GiB x1.00"),
        ("plan that does not fit", "fits 3 fp32 on 1 8 15.0 GiB x1.25 4.0 GiB 12.0 GiB"),
        ("plan of which nothing fits", "even with B = 1; none of the other ways fits"),
        ("plan of which nothing fits", "no DeepSpeed JSON: the lowest ZeRO stage that fits"),
        ("other", "PROBLEM"),
        ("other", "name found state fix compilernoneproblem-"),
    ],
)  # fmt: skip
def test_what_a_record_holds_is_said(name: str, said: str) -> None:
    assert said.replace(" ", "") in words(name).replace(" ", "")


def test_figures_are_drawn_where_there_is_something_to_draw() -> None:
    drawn = {name: page_of(name).tags.count("svg") for name in RECORDS}
    assert {name: number for name, number in drawn.items() if number} == {
        "bench accepted": 2, "bench rejected": 2, "run finished": 4, "run failed": 4,
        "plan that fits": 1, "plan that does not fit": 2, "plan of which nothing fits": 1,
    }  # fmt: skip


def test_a_long_run_is_thinned_and_keeps_its_span() -> None:
    def curve(steps: int) -> str:
        lines = [TrainStep(step=n, tokens=n, loss=float(n % 7)) for n in range(1, steps + 1)]
        return str(run_drawings.losses(lines))

    short, long = curve(run_drawings.MOST_POINTS), curve(50 * run_drawings.MOST_POINTS)
    assert "var(--faint)" in long
    assert len(long) < 3 * len(short)
    assert run_drawings.losses([]) == run_drawings.gradient_norm([]) == ""


def test_a_plan_that_does_not_fit_shows_no_way_as_planned() -> None:
    assert "planned0fp32" in words("plan that fits").replace(" ", "")
    assert "planned0fp32" not in words("plan that does not fit").replace(" ", "")


def test_a_category_too_small_to_be_seen_is_not_named_beside_the_bars() -> None:
    drawn = str(plan_drawings.phases(kinds.way(2**34), 2**34))
    assert "logits" in drawn
    assert "data" not in drawn


def test_text_of_a_record_is_never_markup() -> None:
    bad = '<script>alert("x")</script>'
    run = kinds.train(steps=0, name=bad, reason=bad, data={"source": bad}, experiment={bad: bad}, command=[bad])
    split = kinds.bench(reason=bad, advice=[bad], warnings=[bad], label=bad, candidates=[])
    plan = kinds.plan(experiment=bad, deepspeed=bad, written=bad, advice=[bad], command=[bad])
    for found in map(Page, (as_html(run), as_html(split), as_html(plan), as_one_page({bad: run, "other": split}))):
        assert "script" not in found.tags
        assert found.shown.count(bad) >= 4


# --- many at once ---


@functools.cache
def many() -> tuple[dict[str, Record], Page]:
    given: dict[str, Record] = {
        "a.json": records.loss_scaled_twice(), "b.json": watch_records.nothing_measured(),
        "c.json": watch_records.nothing_measured(), "run-1": kinds.train(), "faults.json": kinds.faults(sound=True),
    }  # fmt: skip
    return given, Page(as_one_page(given))


def test_one_record_is_as_by_itself() -> None:
    pages = [re.sub(r'"#?\w+"', "", page(kinds.other())) for page in (as_html, lambda one: as_one_page({"x": one}))]
    assert pages[0] == pages[1]


def test_verdicts_of_all_come_before_any_record() -> None:
    given, found = many()
    shown = re.sub(r"\s+", " ", found.shown)
    places = [shown.index(name) for name in given]
    assert places == sorted(places)
    assert max(places) < shown.index("What was verified")
    contents = shown[: shown.index("What was verified")]
    assert contents.count("cause: loss-scaled-twice") == 1
    assert "FINISHED: 12 steps" in contents
    assert "CAUGHT: 2 of 2" in contents


def test_links_lead_to_each_record_and_no_two_places_share_a_name() -> None:
    given, found = many()
    assert found.tags.count("article") == len(given)
    assert {f"#record-{number}" for number in range(1, len(given) + 1)} <= set(found.targets)
    assert {target[1:] for target in found.targets} <= set(found.ids)
    assert len(found.ids) == len(set(found.ids))
    assert found.tags.count("h1") == 1, "headings of records are one level down"
    assert found.source.count("The record as JSON") == len(given)


def test_every_schema_with_a_template_has_a_conclusion() -> None:
    from dsaccum.cli.reading import RECORDS as READ

    assert TEMPLATES.keys() == BY_SCHEMA.keys() == READ.keys()
    shown: set[Any] = {getattr(of(), "schema_name") for of, _ in RECORDS.values()}  # noqa: B009
    assert {"dsaccum.faults/1", "dsaccum.audit/1", "dsaccum.bench/1", "dsaccum.train/1", "dsaccum.plan/1"} <= shown
