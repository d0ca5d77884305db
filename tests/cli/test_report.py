"""``dsaccum report``: which paths it takes, what it refuses in one line, and the page that it writes.

Run: pytest tests/cli/test_report.py -n 0. Not covered: what stands on the page (tests/report).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsaccum.cli import main
from tests.report import kinds, records


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a record, a run, and what is neither."""
    monkeypatch.chdir(tmp_path)
    records.record().write(tmp_path / "verify.json")
    (tmp_path / "run").mkdir()
    run = kinds.train()
    run.write(tmp_path / "run/run.json")
    lines = [step.model_dump_json() + "\n" for step in run.steps]
    (tmp_path / "run/metrics.jsonl").write_text("".join(lines) + '{"step": 13, "tok')
    (tmp_path / "empty").mkdir()
    for name, text in {
        "ds.json": '{"gradient_accumulation_steps": 4}',
        "broken.json": '{"schema": "dsaccum.verify/1",}',
        "newer.json": '{"schema": "dsaccum.verify/2"}',
        "half.json": '{"schema": "dsaccum.bench/1", "total": 16}',
        "list.json": "[1]",
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def report(*words: str) -> int:
    return main(["report", *words, "-o", "out.html"])


def test_records_and_runs_become_one_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report("verify.json", "run") == 0
    assert capsys.readouterr().out == "written to out.html\n"
    page = (folder / "out.html").read_text()
    assert "EQUIVALENT: 4 micro-batches" in page
    assert "FINISHED: 12 steps" in page, "a line that is not whole is left out"


def test_a_run_can_be_named_by_its_record(folder: Path) -> None:
    assert report("run/run.json") == 0
    assert "FINISHED: 12 steps" in (folder / "out.html").read_text()


def test_a_run_without_a_step_has_a_page(folder: Path) -> None:
    (folder / "run/metrics.jsonl").unlink()
    assert report("run") == 0
    assert "no step yet" in (folder / "out.html").read_text()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("verifi.json", "verifi.json: there is no such file; fix: verify.json"),
        ("empty", "empty: is no run: it holds no run.json; allowed: a training run's directory, or a record: dsaccum."),
        ("ds.json", "ds.json: schema: is no record: it has no such key; allowed: a training run's directory"),
        ("broken.json", "broken.json: line 1, column 31: a comma before the closing bracket"),
        ("newer.json", 'newer.json: schema = "dsaccum.verify/2": is no schema that has a report; allowed:'),
        ("half.json", "half.json: world_size: is not what its schema says: Field required; fix: make the record again"),
        ("list.json", "list.json: must hold a JSON object, not a list"),
    ],
)
def test_what_is_no_record_is_refused_in_one_line(
    path: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report("verify.json", path) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {said}")
    assert error.count("\n") == 1
    assert not (folder / "out.html").exists()


def test_metrics_that_are_none_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run/metrics.jsonl").write_text('{"step": "one"}\n')
    assert report("run") == 2
    assert "error: run/metrics.jsonl: step: is not what its schema says" in capsys.readouterr().err


def test_nothing_is_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "out.html").write_text("precious")
    assert report("verify.json") == 2
    assert 'error: --output = "out.html": is there already' in capsys.readouterr().err
    assert (folder / "out.html").read_text() == "precious"


def test_a_record_and_a_file_to_write_are_needed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "-o", "out.html"]) == 2
    assert "no record was given; fix: dsaccum report verify.json -o report.html" in capsys.readouterr().err
    assert main(["report", "verify.json"]) == 2
    assert "no file to write was given; fix: -o report.html" in capsys.readouterr().err


def test_every_verdict_is_written_with_0(folder: Path) -> None:
    records.loss_scaled_twice().write(folder / "wrong.json")
    assert report("wrong.json") == 0
    assert "NOT EQUIVALENT" in (folder / "out.html").read_text()


def test_the_schema_of_a_record_is_that_of_its_file(folder: Path) -> None:
    """Control: what is read is what was written."""
    from dsaccum.cli.reading import read_record

    assert read_record(folder / "verify.json") == records.record()
    assert (
        read_record(folder / "run").as_json()
        == json.dumps(json.loads((folder / "run/run.json").read_text()), indent=2) + "\n"
    )
