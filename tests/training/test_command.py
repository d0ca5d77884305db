"""The command as users run it: what it prints, what it leaves, what it refuses.

Run: pytest tests/training/test_command.py. Not covered: failures of ranks (test_failures.py), figures of the default
run (tests/configs, slow).
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsaccum.training.main import _let_signals_interrupt
from tests.training.launching import ACCUM4, REPOSITORY, TINY, TRAIN, environment, run_train


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory):
    """One small run on two ranks, through the launcher, with monitors on."""
    folder = tmp_path_factory.mktemp("run")
    config = json.loads(ACCUM4.read_text())
    config["csv_monitor"] = {"enabled": True, "output_path": str(folder / "csv"), "job_name": "job"}
    config["tensorboard"] = {"enabled": True, "output_path": str(folder / "tensorboard"), "job_name": "job"}
    (folder / "monitored.json").write_text(json.dumps(config))
    ended = run_train(
        *TINY, "--steps", "4", "--micro-batch", "2", cwd=folder, ranks=2, deepspeed=folder / "monitored.json"
    )
    assert ended.code == 0, ended.said
    return folder, ended


@pytest.mark.distributed
def test_start_shows_the_equation_and_the_end_what_came_of_it(finished_run) -> None:
    _, ended = finished_run
    for expected in [
        "effective batch = 2 ranks x 4 accumulation steps x 2 micro-batch = 16 samples, 512 tokens",
        "fp32, gradients accumulated in fp32, ZeRO stage 0, clipping 1.0",
        "step 1/4  loss ",
        "step 4/4  loss ",
        "at the start, ",
        "held-out loss   ",
        "tokens/s",
        "sample          after a held-out prompt",
        "model           runs/stdlib-nano-1/model",
        "--accum-steps 8 --micro-batch 1",
    ]:
        assert expected in ended.stdout, expected
    ours = [line for line in ended.said.splitlines() if not re.match(r"\[\d{4}-|\s*$", line)]
    assert not [
        line for line in ours if "deepspeed" in line.lower() and "versions" not in line and "try next" not in line
    ]
    assert "Warning" not in ended.said


@pytest.mark.distributed
def test_metrics_hold_one_line_per_optimizer_step(finished_run) -> None:
    folder, _ = finished_run
    lines = [json.loads(line) for line in (folder / "runs/stdlib-nano-1/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["samples"] for line in lines] == [16, 32, 48, 64]
    assert [line["tokens"] for line in lines] == [16 * 31 * step for step in (1, 2, 3, 4)]
    keys = {
        "step", "samples", "tokens", "loss", "learning_rate", "gradient_norm", "seconds", "applied", "effective_batch",
        "held_out_loss",
    }  # fmt: skip
    assert all(set(line) == keys and line["applied"] and line["gradient_norm"] > 0 for line in lines)
    assert lines[-1]["loss"] < lines[0]["loss"]


@pytest.mark.distributed
def test_record_holds_what_decided_the_run(finished_run) -> None:
    folder, _ = finished_run
    record = json.loads((folder / "runs/stdlib-nano-1/run.json").read_text())
    assert record["schema"] == "dsaccum.train/1"
    assert record["status"] == "finished"
    assert record["effective_batch"] == {"world_size": 2, "micro_batch": 2, "accumulation_steps": 4, "total": 16}
    assert record["deepspeed"]["train_batch_size"] == 16
    assert record["experiment"]["run"]["steps"] == 4
    assert re.fullmatch(r"[0-9a-f]{64}", record["data"]["sha256"])
    assert {"torch", "deepspeed", "transformers", "dsaccum", "python"} <= set(record["versions"])


@pytest.mark.distributed
def test_model_is_loaded_by_transformers(finished_run) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, _ = finished_run
    model = AutoModelForCausalLM.from_pretrained(folder / "runs/stdlib-nano-1/model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "runs/stdlib-nano-1/model")
    assert model.config.use_cache, "off in training only"
    assert model.get_input_embeddings().weight.shape == (384, 16)
    tokens = tokenizer("def main():", return_tensors="pt").input_ids
    assert torch.isfinite(model(input_ids=tokens).logits).all()


@pytest.mark.distributed
def test_monitors_receive_the_window_s_loss(finished_run) -> None:
    folder, _ = finished_run
    metrics = [json.loads(line) for line in (folder / "runs/stdlib-nano-1/metrics.jsonl").read_text().splitlines()]
    (loss_file,) = (folder / "csv" / "job").glob("*train_loss*")
    rows = [line.split(",") for line in loss_file.read_text().splitlines()[1:]]
    assert [int(samples) for samples, _ in rows] == [16, 32, 48, 64]
    assert [float(loss) for _, loss in rows] == pytest.approx([line["loss"] for line in metrics])
    assert list((folder / "tensorboard").rglob("events*"))


@pytest.mark.distributed
def test_a_second_run_makes_a_second_directory_and_a_finished_one_is_refused(finished_run) -> None:
    folder, _ = finished_run
    again = run_train(*TINY, "--steps", "1", "--verbose", cwd=folder)
    assert again.code == 0, again.said
    assert (folder / "runs/stdlib-nano-2/run.json").exists()
    before = sorted(folder.rglob("*"))
    refused = run_train(*TINY, "--output-dir", "runs/stdlib-nano-1", "--resume", "never", cwd=folder)
    assert refused.code == 2
    assert len(refused.errors) == 1
    assert "it holds a run already (stdlib-nano, finished)" in refused.errors[0]
    assert "another --output-dir, or remove runs/stdlib-nano-1" in refused.errors[0]
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--output-dir", "foreign"], ["it holds files that are not a run of dsaccum", "another --output-dir"]),
        pytest.param(
            ["--output-dir", "foreign/file.txt"], ["is a file", "a new or empty directory"], marks=pytest.mark.slow
        ),
        (["--accum-step", "4"], ["command line", "--accum-step"]),
        (["--accum-steps", "four"], ["--accum-steps", "four"]),
        (["--steps", "0"], ["--steps = 0", "1 or more"]),
        (["--steps"], ["--steps", "expected one argument"]),
        (["--experiment", "missing.yaml"], ["missing.yaml"]),
        (["--set", "run.stepz=3"], ["run.stepz", "steps"]),
        pytest.param(["--set", "data.source=files"], ["data.files"], marks=pytest.mark.slow),
        pytest.param(
            ["--set", "data={source: files, files: ['nothing/*.txt']}"],
            ["data.files", "matches no file"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--set", "data={source: files, files: ['foreign/file.txt']}"],
            ["makes 0 samples", "data.sequence_length"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--set", "data.sequence_length=9999", "--set", "model.config={max_position_embeddings: 64}"],
            ["data.sequence_length"],
            marks=pytest.mark.slow,
        ),
        (["--set", "model.config={hiden_size: 16}"], ["model.config.hiden_size", "did you mean hidden_size?"]),
        pytest.param(["--set", "model.architecture=gtp2"], ["model.architecture", "gpt2"], marks=pytest.mark.slow),
    ],
    ids=lambda value: " ".join(value)[:40] if value and value[0].startswith("--") else "",
)
def test_a_mistake_is_one_line_and_changes_nothing(tmp_path: Path, flags: list[str], words: list[str]) -> None:
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "file.txt").write_text("hi\n")
    before = sorted(tmp_path.rglob("*"))
    ended = run_train(*flags, cwd=tmp_path)
    assert ended.code == 2, ended.said
    assert len(ended.errors) == 1
    assert ended.said.count("\n") == 1, "one line and nothing else: " + ended.said
    for word in words:
        assert word in ended.errors[0]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.distributed
def test_on_two_ranks_a_mistake_is_said_once(tmp_path: Path) -> None:
    ended = run_train("--accum-steps", "3", "--set", "run.steps=none", cwd=tmp_path, ranks=2)
    assert ended.code == 2
    assert len(ended.errors) == 1, ended.said
    assert "Traceback" not in ended.said, "the launcher ends the rank that has left the word to rank 0"


def test_deepspeed_s_own_spelling_is_understood(tmp_path: Path) -> None:
    flags = ["--deepspeed", "--deepspeed_config", str(ACCUM4), "--local_rank", "0", "--steps", "1"]
    assert run_train(*TINY, *flags, cwd=tmp_path).code == 0
    ended = run_train("--deepspeed", cwd=tmp_path)
    assert ended.code == 2
    assert "no DeepSpeed JSON was given" in ended.errors[0]


def test_short_samples_and_zero_3_are_no_special_case(tmp_path: Path) -> None:
    flags = ["--set", "data.sequence_length=8", "--steps", "1"]
    ended = run_train(*TINY, *flags, cwd=tmp_path, deepspeed=REPOSITORY / "ds_configs/zero3_accum4.json")
    assert ended.code == 0, ended.said
    # Two times 384 x 16 for embedding and head; 12 x 16 x 16 weights, 13 x 16 biases and norms in the layer; a norm.
    assert "GPTNeoXForCausalLM, 15,600 parameters" in ended.stdout, ended.stdout


@pytest.mark.parametrize("closed", ["stdout", "narrow"])
def test_output_that_cannot_be_written_does_not_fail_a_run(tmp_path: Path, closed: str) -> None:
    command = [sys.executable, str(TRAIN), "--deepspeed", str(ACCUM4), *TINY, "--steps", "1", "--output-dir", "run"]
    if closed == "stdout":
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    env = environment(PYTHONIOENCODING="ascii") if closed == "narrow" else environment()
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"


def test_no_compiler_is_needed(tmp_path: Path) -> None:
    """An empty extension cache and no compiler on PATH: a first start compiles nothing."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    env = environment(PATH=str(bin_folder), TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"))
    env.pop("CXX", None)
    ended = run_train(*TINY, "--steps", "1", cwd=tmp_path, env=env)
    assert ended.code == 0, ended.said
    assert not list((tmp_path / "extensions").rglob("*"))


def test_help_is_quick_and_says_what_decides_a_run(tmp_path: Path) -> None:
    ended = run_train("--help", cwd=tmp_path)
    assert ended.code == 0
    for flag in ("--deepspeed", "--experiment", "--accum-steps", "--micro-batch", "--set", "--output-dir"):
        assert flag in ended.stdout
    heavy = "('torch', 'deepspeed', 'transformers')"
    script = f"import sys, dsaccum.training.main; print([m for m in {heavy} if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert loaded.stdout.strip() == "[]"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_scheduler_s_signal_interrupts_what_is_still_reading(number: signal.Signals) -> None:
    """By default it would end the process without a line, and with no code of ours."""
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        _let_signals_interrupt()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
