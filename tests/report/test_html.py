"""A record as one HTML page: the verdict first, all of the record in it, nothing from outside, nothing as markup.

Run: pytest tests/report/test_html.py -n 0. Not covered: how it looks.
"""

from __future__ import annotations

import functools
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsaccum.records import Record
from dsaccum.report.html import as_html, drawings, write_html
from dsaccum.report.html.page import TEMPLATES
from dsaccum.report.weight_views import weight_views
from dsaccum.verification.records.parts import StepRecord, UpdateRecord
from dsaccum.verification.records.record import GradientRecord
from dsaccum.verification.records.watch import TokenWeightsRecord, WatchRecord, WindowRecord
from tests.report import records, watch_records
from tests.report.pages import Page

RECORDS: dict[str, Callable[[], Record]] = {
    "watch right": watch_records.right,
    "watch wrong": watch_records.wrong,
    "watch two engines": watch_records.two_engines,
    "watch nothing measured": watch_records.nothing_measured,
    "watch nothing seen": lambda: WatchRecord(messages=["nothing to watch"]),
    "verify equivalent": records.record,
    "verify not equivalent": records.loss_scaled_twice,
    "verify by rank": records.ranks_not_reduced,
    "verify nothing tested": records.untested_update,
    "verify without steps": lambda: records.record(steps=[], communication={}, memory={}, trajectory={}),
}
"""Right and wrong ones are each other's control."""


def page(record: Record) -> Page:
    return Page(as_html(record))


@functools.cache
def page_of(name: str) -> Page:
    return page(RECORDS[name]())


@pytest.mark.parametrize("name", RECORDS)
def test_a_page_needs_nothing_beside_it(name: str) -> None:
    found = page_of(name)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form"} & set(found.tags)
    assert all(target.startswith("#") for target in found.targets), "links lead within the page"
    assert {target[1:] for target in found.targets} <= set(found.ids)
    assert len(found.ids) == len(set(found.ids))
    assert not re.search(r"url\((?!#)|@import|https?:", found.source.partition("<pre>")[0])


@pytest.mark.parametrize("name", RECORDS)
def test_every_number_that_is_null_is_said_in_words(name: str) -> None:
    shown = re.sub(r"\s+", " ", page_of(name).shown.partition("The record as JSON")[0])
    assert not re.search(r"\bNone\b|\bnan\b|\binf\b|Undefined", shown)


@pytest.mark.parametrize("name", RECORDS)
def test_the_verdict_comes_first(name: str) -> None:
    record: Any = RECORDS[name]()
    found = page_of(name)
    word = {"equivalent": r"RIGHT|EQUIVALENT", "not_equivalent": r"WRONG|NOT EQUIVALENT", None: "NONE"}[record.verdict]
    heading = re.search(r"<h1>(.*?)</h1>", found.source)
    assert heading
    assert re.match(rf"({word})[:,] ", heading[1])
    assert found.tags.index("h1") < found.tags.index("h2")


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("watch wrong", "hand the undivided loss"),
        ("watch two engines", "hand the undivided loss"),
        ("verify not equivalent", "delete `loss = loss / 4`"),
    ],
)
def test_causes_stand_above_everything_else(name: str, fix: str) -> None:
    above = page_of(name).shown.partition("Claims")[0]
    assert "loss-scaled-twice" in above
    assert fix in above
    assert "loss-scaled-twice" not in page_of("watch right").shown


def test_engines_are_called_by_their_names() -> None:
    assert "Window 3 of engine 2, GPT2LMHeadModel" in page_of("watch two engines").shown
    assert "of engine" not in page_of("watch right").shown.partition("The record as JSON")[0]


def test_a_watched_windows_figures_are_all_there() -> None:
    shown = re.sub(r"\s+", " ", page_of("watch wrong").shown)
    for said in (
        "2 ranks x 4 micro-steps x 2 rows = 16 rows, 240 target tokens",  # what ran
        "script0.2500", "engine0.2500", "accumulation and ranks0.5000",  # who divided
        "due, rank 0due, rank 1recovered, rank 0recovered, rank 1", "micro-step 40.12500.12500.03120.0312",
        "0.250000, due 1", "0.2500 to 0.2500",  # tokens
        "gradient1.5e-07 6.1e-07 1.0000transformer.h.1.attn.c_attn.weight",
        "gradient norm1.0695", "clipped to1.0000", "learning rate6.0e-04",
        "weightingfailrank 0: the window's tokens weigh 0.25 in all", "replicasnot applicablenot looked at",
        "a note of the watch", "the watch said this",
        "python -m dsaccum.watch -- train.py", "torch 2.13.0",
    ):  # fmt: skip
        assert said.replace(" ", "") in shown.replace(" ", ""), said
    assert page_of("watch wrong").tags.count("svg") == 3


def test_resources_are_shown_where_a_window_has_them() -> None:
    assert "Communication" not in page_of("watch right").shown.partition("The record as JSON")[0]
    window = watch_records.right().engines[0].windows[0]
    steps = [SimpleNamespace(micro_step=n, before_bytes=(7 + n) << 20, activation_bytes=3 << 20) for n in (1, 2, 3, 4)]
    memory = SimpleNamespace(per_micro_step=steps, growth_bytes=2 << 20, allowed_bytes=1 << 10, reason="it grows")
    found = Page(_rendered_with(window, communication=records.communication(4), memory=memory))
    assert "only at the boundary" in found.shown
    assert "What stays alive grows by 2.0 MiB from micro-step 2 to the last; 1.0 KiB may" in found.shown
    assert found.tags.count("svg") == page_of("watch right").tags.count("svg") + 2
    other = Page(_rendered_with(window, communication=records.communication(4), memory=SimpleNamespace(other=1)))
    assert "What stays alive" not in other.shown, "of another shape: left out"


def _rendered_with(window: WindowRecord, **added: Any) -> str:
    """A page of a record whose window has parts that the schema may not have yet."""
    engine = watch_records.right().engines[0]
    seen = SimpleNamespace(**{**dict(window), **added})
    stand_in = SimpleNamespace(**{**dict(engine), "windows": [seen]})
    record = watch_records.right()
    whole = SimpleNamespace(**{**dict(record), "engines": [stand_in], "as_json": record.as_json})
    return as_html(whole)  # type: ignore[arg-type]


def test_text_of_a_record_is_never_markup() -> None:
    bad = '<script>alert("x")</script>&\'<img src=x onerror=y>'
    for record in (watch_records.with_text(bad), _verify_with_text(bad)):
        found = page(record)
        assert "script" not in found.tags
        assert "img" not in found.tags
        assert found.shown.count('<script>alert("x")</script>') >= 6
    assert "<script>" in page(watch_records.with_text(bad)).shown, "control: it is there, as text"


def _verify_with_text(bad: str) -> Record:
    found = records.loss_scaled_twice().model_dump()
    found["model"]["class_name"] = found["loop"] = found["fault"] = bad
    found["reasons"]["gradient"] = found["communication"]["reason"] = bad
    found["substitutions"] = found["warnings"] = found["remedies"] = [bad]
    found["causes"][0]["summary"] = found["causes"][0]["fix"] = bad
    found["causes"][0]["evidence"] = {bad: bad}
    found["experiment"] = {"name": bad}
    found["command"], found["hardware"] = ["dsaccum", bad], {bad: bad}
    for step in found["steps"]:
        step["gradient"]["worst_parameter"] = bad
    return records.VerifyRecord(**found)


def test_what_is_not_finite_is_said_and_drawn_without_harm() -> None:
    step = records.step(1, 4, 2, gradient=GradientRecord(error=math.nan, bound=1e-6), update=UpdateRecord(bound=1e-6))
    shown = page(records.record(steps=[step])).shown
    assert shown.count("not finite") == 2
    assert "not finite" not in page_of("verify equivalent").shown
    assert drawings.errors([StepRecord(step=1)]) == ""
    assert drawings.token_histogram(TokenWeightsRecord(histogram=[(None, 3)])) == ""
    assert drawings.peaks([]) == drawings.traffic([]) == ""


def test_a_wrong_weight_has_another_colour() -> None:
    right, wrong = (weight_views(each.steps[0].micro_batch_weights)[0][1]
                    for each in (records.record(), records.loss_scaled_twice()))  # fmt: skip
    assert "var(--wrong)" in drawings.weights(wrong)
    assert "var(--right)" not in drawings.weights(wrong)
    assert "var(--wrong)" not in drawings.weights(right)
    assert not re.search(r"#0[1-9]0", drawings.weights(right) + drawings.errors(records.record().steps))


def test_a_page_is_never_written_over_a_file(tmp_path: Path) -> None:
    write_html(records.record(), tmp_path / "out.html")
    before = (tmp_path / "out.html").read_text()
    with pytest.raises(FileExistsError):
        write_html(records.loss_scaled_twice(), tmp_path / "out.html")
    assert (tmp_path / "out.html").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out.html"]


def test_a_scripts_own_matplotlib_is_left_alone() -> None:
    import matplotlib

    with matplotlib.rc_context({"font.size": 33.0}):
        backend = matplotlib.rcParams._get("backend")
        assert "font-size: 33" not in drawings.errors(records.record().steps)
        assert matplotlib.rcParams["font.size"] == 33.0
        assert matplotlib.rcParams._get("backend") == backend


def test_every_template_is_of_a_schema() -> None:
    folder = Path(drawings.__file__).parent / "templates"
    assert {path.name for path in folder.iterdir()} == {*TEMPLATES.values(), "page.html", "parts.html", "style.css"}


def test_nothing_of_it_is_loaded_before_it_is_asked_for() -> None:
    code = (
        "import sys, dsaccum.watch.session, dsaccum.cli, dsaccum.testing; "
        "print([name for name in ('matplotlib', 'dsaccum.report.html') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.splitlines()[-1] == "[]"
