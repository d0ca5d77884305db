"""The choice of a split, other ways with their prices, the JSON that is written, and mistakes.

Run: pytest tests/planning/test_plan.py -n 0. Not covered: whether bytes are right, see the other files here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsaccum.config.deepspeed import resolve_deepspeed_config
from dsaccum.config.errors import ConfigError
from dsaccum.config.loading import load_experiment
from dsaccum.planning.flags import PlanFlags, parse_memory
from dsaccum.planning.plan import Plan, make_plan
from dsaccum.planning.record import PlanRecord
from dsaccum.planning.ways import Way, config_of, other_ways
from dsaccum.report.layout import as_plain_text
from dsaccum.report.plan import plan_lines
from tests.planning.subjects import deepspeed_config

EXPERIMENT = """
name: planned
model:
  architecture: gpt2
  config: {n_embd: 64, n_layer: 5, n_head: 4, vocab_size: 400}
data: {sequence_length: 32}
auto: {lr: 1.0e-3, warmup_num_steps: 2}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "e.yaml").write_text(EXPERIMENT)
    (folder / "zero2.json").write_text(json.dumps(deepspeed_config(2, reduce_bucket_size=10_000)))
    return folder


@pytest.fixture(scope="module")
def flags(folder: Path) -> PlanFlags:
    return PlanFlags(folder / "e.yaml", effective_batch=48, ranks=2, memory=16 * 10**6, device="cpu")


@pytest.fixture(scope="module")
def plan(flags: PlanFlags) -> Plan:
    with pytest.MonkeyPatch.context() as patch:  # each precision, with and without checkpointing, is a trace of its own
        ways = [Way(1, "fp32", False), Way(2, "fp32", False), Way(0, "fp32", True)]
        patch.setattr("dsaccum.planning.plan.other_ways", lambda _: ways)
        return make_plan(flags)


def test_the_largest_micro_batch_that_divides_and_fits(plan: Plan, flags: PlanFlags) -> None:
    record = plan.record
    batch, best = record.effective_batch, record.chosen and record.chosen.best
    assert batch is not None
    assert best is not None
    assert record.chosen is not None
    assert batch.world_size * batch.accumulation_steps * batch.micro_batch == batch.total == 48
    assert best.peak_bytes <= flags.memory
    next_larger = record.chosen.splits[0]
    assert next_larger.peak_bytes > flags.memory
    assert next_larger.micro_batch > best.micro_batch
    assert record.chosen.largest_micro_batch >= best.micro_batch


def test_categories_add_up_to_each_phase(plan: Plan) -> None:
    for way in (plan.record.asked, *plan.record.others):
        for split in way.splits:
            assert split.peak_bytes == max(phase.peak_bytes for phase in split.phases.values())
            for phase in split.phases.values():
                assert sum(phase.by_category.values()) == phase.peak_bytes


def test_prices_of_other_ways(plan: Plan) -> None:
    plain = {(way.zero_stage, way.precision): way for way in plan.record.others if not way.activation_checkpointing}
    asked, elements = plan.record.asked, plan.record.model.trained
    assert asked.zero_stage == 0
    assert asked.price.compute == 1
    assert asked.price.gradient_bytes == 4 * elements
    assert asked.price.parameter_bytes == 0
    assert plain[1, "fp32"].price.gradient_bytes == 4 * elements
    two = plain[2, "fp32"]
    assert two.best is not None
    assert two.price.gradient_bytes == 4 * elements * two.best.accumulation_steps
    checkpointed = next(way for way in plan.record.others if way.activation_checkpointing)
    assert checkpointed.price.compute is not None
    assert 1.1 < checkpointed.price.compute < 4 / 3


def test_the_written_json_is_read_by_the_training_command(plan: Plan, folder: Path) -> None:
    from dsaccum.engine.schema import installed_schema

    assert plan.config is not None
    assert plan.record.effective_batch is not None
    settings = resolve_deepspeed_config(
        plan.config,
        "out.json",
        schema=installed_schema(),
        experiment=load_experiment(folder / "e.yaml"),
        world_size=2,
    )
    assert settings.batch.total == 48
    assert settings.batch.micro_batch == plan.record.effective_batch.micro_batch


@pytest.fixture
def nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ways cost most of a plan's time."""
    monkeypatch.setattr("dsaccum.planning.plan.other_ways", lambda _: [])


@pytest.mark.usefixtures("nothing_else")
def test_without_a_json_the_lowest_stage_that_fits_is_chosen(flags: PlanFlags) -> None:
    eight = replace(flags, ranks=8)
    one = make_plan(replace(eight, memory=1)).record.asked.short_bytes + 1
    tight = make_plan(replace(eight, memory=one - 1)).record
    assert tight.asked.fits is False
    assert tight.asked.short_bytes == 1
    assert tight.chosen is not None
    assert tight.chosen.zero_stage > 0


@pytest.mark.usefixtures("nothing_else")
def test_with_a_json_its_stage_stays_and_not_fitting_says_what_would(flags: PlanFlags, folder: Path) -> None:
    no = make_plan(replace(flags, deepspeed=folder / "zero2.json", memory=10**6))
    assert no.config is None
    assert no.record.chosen is None
    assert not no.record.fits
    assert "none of these ways fits" in no.record.advice[-1]
    text = as_plain_text(plan_lines(no.record))
    assert "ZeRO 2, fp32 does not fit at any N" in text
    assert "short" in text


def test_the_report_ends_with_the_plan(plan: Plan) -> None:
    lines = as_plain_text(plan_lines(plan.record)).splitlines()
    assert all(len(line) <= 100 for line in lines)
    assert lines[-1].startswith("plan            ZeRO 0, fp32: 2 ranks x ")


def test_the_record_survives_its_file(plan: Plan, tmp_path: Path) -> None:
    plan.record.write(tmp_path / "plan.json")
    assert PlanRecord.read(tmp_path / "plan.json") == plan.record
    assert json.loads((tmp_path / "plan.json").read_text())["schema"] == "dsaccum.plan/1"


def test_other_ways_come_nearest_first_and_change_only_what_they_say() -> None:
    asked = Way(1, "fp32", False)
    ways = list(other_ways(asked))
    assert ways[0] == Way(2, "fp32", False)
    assert len(ways) == 11
    assert all(way.stage >= 1 for way in ways)
    changed = config_of(Way(1, "bf16", False), asked, deepspeed_config(1))
    assert changed["bf16"] == {"enabled": True}
    assert changed["data_types"] == {"grad_accum_dtype": "fp32"}
    assert config_of(Way(2, "fp32", True), asked, deepspeed_config(1)) == deepspeed_config(2)


@pytest.mark.parametrize(("text", "size"), [("24GiB", 24 * 2**30), ("80 GB", 80 * 10**9), ("1.5MiB", 1572864),
                                            ("1000", 1000)])  # fmt: skip
def test_amounts_of_memory(text: str, size: int) -> None:
    assert parse_memory(text, key="--memory") == size


@pytest.mark.parametrize("text", ["24 gigs", "", "0GiB", "-1GiB", "GiB", "1e3GB"])
def test_no_amounts_of_memory(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--memory = .* is no amount of memory; allowed: .*; fix: --memory "):
        parse_memory(text, key="--memory")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"effective_batch": 47},
            "--effective-batch: train_batch_size 47 is not 2 ranks .* fix: --effective-batch 46 or 48",
        ),
        ({"ranks": 0}, "--ranks = 0: must be at least 1; fix: --ranks 1"),
    ],
)
def test_numbers_that_do_not_go(flags: PlanFlags, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_plan(replace(flags, **changes))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage = 4: is no ZeRO stage; allowed: 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "its memory is not known here"),
        ({"optimizer": {"type": "Adafactor", "params": {"lr": 0.1}}}, 'fix: write "AdamW"'),
        ({"optimizer": {"type": "Nobody"}}, "its memory is not known here; allowed: Adam"),
        ({"optimizer": {}}, "optimizer.type: is missing"),
        ({"zero_optimization": None}, "zero_optimization = null: is no object"),
        ({"zero_optimization": True}, "zero_optimization = true: is no object"),
        ({"bf16": None}, "bf16 = null: is no object"),
        (
            {"zero_optimization": {"stage": 1, "reduce_bucket_size": "big"}},
            "reduce_bucket_size = .* is no number of elements",
        ),
    ],
)
def test_json_whose_memory_is_not_known(flags: PlanFlags, tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(deepspeed_config(1) | change))
    with pytest.raises(ConfigError, match=problem) as raised:
        make_plan(replace(flags, deepspeed=path))
    assert str(raised.value).startswith(str(path))


@pytest.mark.slow
def test_a_plan_loads_no_deepspeed(folder: Path, tmp_path: Path) -> None:
    words = [
        "plan",
        "--experiment",
        str(folder / "e.yaml"),
        "--effective-batch",
        "8",
        "--ranks",
        "2",
        "--memory",
        "1GiB",
    ]
    words += ["--write", str(tmp_path / "out.json")]
    code = f"import sys; from dsaccum.cli import main; code = main({words!r}); print('deepspeed' in sys.modules, code)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1] == "False 0", done.stderr
    assert json.loads((tmp_path / "out.json").read_text())["train_batch_size"] == 8


SEVEN_BILLION = """
name: llama-7b
model:
  architecture: llama
  config: {hidden_size: 4096, intermediate_size: 11008, num_hidden_layers: 32, num_attention_heads: 32,
           num_key_value_heads: 32, vocab_size: 32000}
data: {sequence_length: 2048}
auto: {lr: 3.0e-4, warmup_num_steps: 10}
"""
GPT2_XL = """
name: gpt2-xl
model:
  architecture: gpt2
  config: {n_embd: 1600, n_layer: 48, n_head: 25, vocab_size: 50257}
data: {sequence_length: 1024}
auto: {lr: 3.0e-4, warmup_num_steps: 10}
"""
_IN_A_PROCESS = """
import resource, sys, time
from dsaccum.cli import main
code = main(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_SELF)
print(code, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("experiment", "words", "code"), [(SEVEN_BILLION, ["--memory", "24GiB"], 1),
                                                           (SEVEN_BILLION, ["--memory", "80GiB"], 0),
                                                           (GPT2_XL, ["--memory", "24GiB"], 0)])  # fmt: skip
def test_large_models_are_planned_in_20_seconds_and_2_gigabytes(
    experiment: str, words: list[str], code: int, tmp_path: Path
) -> None:
    (tmp_path / "large.yaml").write_text(experiment)
    # Seven billion parameters take 16 bytes each in fp32 on one rank: 24 GiB are too few at any N.
    ranks = "1" if code else "8"
    flags = ["plan", "--experiment", str(tmp_path / "large.yaml"), "--effective-batch", "512", "--ranks", ranks, *words]
    command = [sys.executable, "-c", _IN_A_PROCESS, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    print(done.stdout)
    ended, seconds, resident = done.stdout.splitlines()[-1].split()
    assert int(ended) == code, done.stderr
    assert float(seconds) < 20
    assert int(resident) < 2e9


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_training_command_runs_the_written_json_unchanged(tmp_path: Path, repository: Path) -> None:
    # The JSON of GPT-2 XL on one rank of 80 GiB; what is trained is shrunk by flags, as this machine is no GPU.
    (tmp_path / "large.yaml").write_text(GPT2_XL)
    out = tmp_path / "out.json"
    words = ["plan", "--experiment", str(tmp_path / "large.yaml"), "--effective-batch", "4", "--ranks", "1"]
    words += ["--memory", "80GiB", "--write", str(out)]
    code = f"import sys; from dsaccum.cli import main; sys.exit(main({words!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
    before = out.read_bytes()
    small = ["model.config.n_layer=2", "model.config.n_embd=100", "data.sequence_length=32", "run.steps=2"]
    flags = [part for each in small for part in ("--set", each)]
    command = [sys.executable, str(repository / "launch" / "train.py"), "--deepspeed", str(out)]
    command += ["--experiment", str(tmp_path / "large.yaml"), "--output-dir", str(tmp_path / "run"), *flags]
    done = subprocess.run([*command, "--preflight", "off"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert out.read_bytes() == before
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
