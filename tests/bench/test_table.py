"""What a person reads of a bench. Run: pytest tests/bench/test_table.py -n 0."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsaccum.bench.decision import advice, judged, overall
from dsaccum.bench.plot import draw
from dsaccum.bench.record import BenchRecord, CandidateRecord, WorkloadRecord
from dsaccum.bench.table import bench_lines
from dsaccum.report.layout import as_plain_text
from tests.bench.records import candidate, failed


def record(*candidates: CandidateRecord, configured: int = 4) -> BenchRecord:
    found = judged(candidates)
    word, reason = overall(found)
    return BenchRecord(
        word=word, reason=reason, advice=advice(found, {}, checkpointing=False), world_size=2, total=32,
        configured_accumulation_steps=configured, candidates=found,
        workload=WorkloadRecord(
            model="GPT2LMHeadModel", parameters=1_853_568, sequence_length=256, precision="fp32", zero_stage=0,
            rounds=4, windows=5, warm_up_windows=2,
        ),
    )  # fmt: skip


ACCEPTED = record(candidate(1, activation=160), candidate(2, activation=80), candidate(4, activation=40, gradient=10))


def test_figures_then_the_word_then_what_to_do() -> None:
    text = as_plain_text(bench_lines(ACCEPTED))
    assert text.index("median") < text.index("verdict         ACCEPT: N = 4, B = 4") < text.index("what helps")
    assert re.search(r"\*4 +4 +80\.0 MiB +50\.0 MiB +1\.000", text)
    assert max(map(len, text.splitlines())) <= 80


def test_it_says_how_to_train_in_the_better_way() -> None:
    better = record(candidate(1, activation=160), candidate(4, activation=40, gradient=10), configured=1)
    assert "--accum-steps 4 --micro-batch 4" in as_plain_text(bench_lines(better))
    assert "--accum-steps" not in as_plain_text(bench_lines(ACCEPTED)), "the JSON has it already"


def test_what_could_not_run_is_named() -> None:
    text = as_plain_text(bench_lines(record(failed(1), candidate(2, activation=80), candidate(4, activation=40))))
    assert "not run         N = 1: rank 1 was killed (signal 9)" in text
    assert "failed" in text


def test_a_record_is_read_back(tmp_path: Path) -> None:
    ACCEPTED.write(tmp_path / "bench.json")
    assert BenchRecord.read(tmp_path / "bench.json") == ACCEPTED


def test_a_picture_is_drawn_and_never_over_another_file(tmp_path: Path) -> None:
    draw(ACCEPTED, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(FileExistsError):
        draw(ACCEPTED, tmp_path / "bench.png")
