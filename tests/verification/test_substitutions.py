"""What is verified in place of what the JSON says: named, minimal, and only where this machine needs it.

Run: pytest -n 0 tests/verification/test_substitutions.py. Not covered: that the substituted config trains alike
(FusedAdam takes 38 s to compile); its defaults are compared with torch's instead.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch

from dsaccum.config.errors import ConfigError
from dsaccum.config.schema import Machine
from dsaccum.verification.cases.substitutions import substitute, verified_batch, with_small_buckets

E, N, B = "train_batch_size", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu"
BARE_CPU = Machine(device="cpu", has_compiler=False, supports_fp16=False)
CPU = Machine(device="cpu", has_compiler=True, supports_fp16=False)
GPU = Machine(device="cuda", has_compiler=True, supports_fp16=True)


def adam(kind: str = "AdamW", **parameters: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": {"lr": 1e-3, **parameters}}}


def test_what_runs_here_is_not_touched() -> None:
    written = {
        **adam(torch_adam=True),
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}},
        "fp16": {"enabled": False},
    }
    changed, notes = substitute(copy.deepcopy(written), BARE_CPU)
    assert notes == []
    assert changed["optimizer"] == written["optimizer"]
    assert changed["bf16"] == written["bf16"]
    assert changed["fp16"] == written["fp16"]


def test_nothing_is_changed_in_place() -> None:
    written = {
        **adam(),
        "fp16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "data_types": {"grad_accum_dtype": "fp16"},
        "communication_data_type": "fp16",
        "wall_clock_breakdown": True,
    }
    before = copy.deepcopy(written)
    _, notes = substitute(written, BARE_CPU)
    assert len(notes) == 3
    assert written == before


def test_observers_are_off_without_a_word() -> None:
    written = {
        **adam(torch_adam=True),
        "tensorboard": {"enabled": True},
        "wandb": {"enabled": True},
        "dump_state": True,
    }
    assert substitute(written, GPU) == (adam(torch_adam=True), [])


@pytest.mark.parametrize(
    ("kind", "parameters", "expected", "named"),
    [
        ("AdamW", {}, {"weight_decay": 0.0}, "torch.optim.AdamW"),
        ("AdamW", {"weight_decay": 0.1}, {"weight_decay": 0.1}, "torch.optim.AdamW"),
        ("AdamW", {"weight_decay": "auto"}, {"weight_decay": "auto"}, "torch.optim.AdamW"),
        ("Adam", {"bias_correction": True}, {"weight_decay": 0.0}, "torch.optim.AdamW"),
        ("Adam", {"adam_w_mode": False}, {"adam_w_mode": False, "weight_decay": 0.0}, "torch.optim.Adam "),
        # torch's Adam cannot leave the correction out: the key stays, and the check of parameters refuses it.
        ("AdamW", {"bias_correction": False}, {"bias_correction": False, "weight_decay": 0.0}, "torch.optim.AdamW"),
    ],
)
def test_fused_adam_on_a_cpu_is_torchs(kind: str, parameters: Any, expected: Any, named: str) -> None:
    for machine in (BARE_CPU, CPU):  # with a compiler too: it would take 40 s and leave a lock if it is ended
        changed, [note] = substitute(adam(kind, **parameters), machine)
        assert changed == adam(kind, torch_adam=True, **expected)
        assert named in note
    assert substitute(adam(kind, **parameters), GPU) == (
        adam(kind, **parameters),
        [],
    )  # negative control: there it runs


def test_defaults_of_fused_adam_and_torchs_differ_in_weight_decay_alone() -> None:
    from deepspeed.ops.adam import FusedAdam

    fused = inspect.signature(FusedAdam.__init__).parameters
    torchs = inspect.signature(torch.optim.AdamW.__init__).parameters
    assert {name for name in ("lr", "betas", "eps", "amsgrad") if fused[name].default != torchs[name].default} == set()
    assert (fused["weight_decay"].default, torchs["weight_decay"].default) == (0.0, 0.01)


@pytest.mark.parametrize("kind", ["Lamb", "Lion", "Muon", "SGD"])
def test_optimizers_without_an_equal_are_left_to_the_checks(kind: str) -> None:
    assert substitute(adam(kind), BARE_CPU) == (adam(kind), [])


def test_offload_is_left_out_and_then_the_optimizer_is_judged_without_it() -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme", "nvme_path": "/x"}}
    changed, notes = substitute({**adam(), "zero_optimization": zero}, BARE_CPU)
    assert changed["zero_optimization"] == {"stage": 3}
    assert [note.split()[0] for note in notes] == ["offload_optimizer", "offload_param", "FusedAdam"]
    old = {**adam(torch_adam=True), "zero_optimization": {"stage": 2, "cpu_offload": True}}
    changed, [note] = substitute(old, GPU)
    assert changed["zero_optimization"] == {"stage": 2}
    assert note.startswith("offload_optimizer is left out")


def test_fp16_becomes_fp32_where_there_is_none() -> None:
    written = {
        **adam(torch_adam=True),
        "fp16": {"enabled": True, "initial_scale_power": 16},
        "zero_optimization": {"stage": 1},
        "data_types": {"grad_accum_dtype": "fp16"},
        "communication_data_type": "fp16",
    }
    changed, [note] = substitute(written, CPU)
    assert changed == {
        **adam(torch_adam=True), "fp16": {"enabled": False}, "zero_optimization": {"stage": 1}, "data_types": {}
    }  # fmt: skip
    assert "fp16 needs a GPU: fp32 instead" in note
    assert substitute(written, GPU) == (written, [])
    autocast = {**adam(torch_adam=True), "torch_autocast": {"enabled": True, "dtype": "float16"}}
    changed, [note] = substitute(autocast, CPU)
    assert changed["torch_autocast"] == {"enabled": False}
    assert note.startswith("torch_autocast in fp16")
    bf16 = {**adam(torch_adam=True), "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    assert substitute(bf16, CPU) == (bf16, [])


def test_fp16_that_is_wrong_on_a_gpu_is_refused_here_too() -> None:
    """fp32 in its place would come out equivalent, and prove nothing about what the user trains."""
    with pytest.raises(ConfigError, match="divides gradients by a loss scale"):
        substitute({**adam(torch_adam=True), "fp16": {"enabled": True}}, CPU)


@pytest.mark.parametrize("section", ["optimizer", "zero_optimization", "fp16", "data_types"])
def test_a_section_left_to_auto_is_left_to_the_checks(section: str) -> None:
    written = {**adam(), section: "auto"}
    assert substitute(written, BARE_CPU) == (written, [])


@pytest.mark.parametrize(
    ("written", "flags", "expected", "said"),
    [
        ({N: 4, B: 4}, {}, (2, 4, 4), None),
        ({E: 32, N: 4, B: 4}, {}, (2, 4, 4), None),
        (
            {E: 64, N: 4, B: 4},
            {},
            (2, 4, 4),
            "64 of the JSON (4 ranks x 4 x 4) is verified as 32 on 2 ranks (2 x 4 x 4)",
        ),
        ({E: "auto", N: 4, B: 4}, {}, (2, 4, 4), None),
        # E with one of the two: the other follows on these ranks, and E stays.
        ({E: 64, N: 4}, {}, (2, 4, 8), None),
        ({E: 64, B: 4, N: "auto"}, {}, (2, 8, 4), None),
        # A flag says N or B, and E follows.
        ({N: 4, B: 4}, {"n": 3}, (2, 3, 4), None),
        ({E: 64, N: 4, B: 4}, {"n": 3}, (2, 3, 4), "64 of the JSON is verified as 24 on 2 ranks (2 x 3 x 4)"),
        ({E: 64, N: 4}, {"b": 2}, (2, 4, 2), "64 of the JSON is verified as 16 on 2 ranks (2 x 4 x 2)"),
        ({E: 64, N: 4}, {"n": 16}, (2, 16, 2), None),
        ({E: "auto", N: "auto", B: "auto"}, {"n": 2, "b": 3}, (2, 2, 3), None),
    ],
)
def test_batch_keeps_n_and_b(written: Any, flags: dict[str, int], expected: Any, said: str | None) -> None:
    batch, notes = verified_batch(written, 2, flags.get("n"), flags.get("b"))
    assert (batch.world_size, batch.accumulation_steps, batch.micro_batch) == expected
    assert notes == ([] if said is None else [f"effective batch {said}"])


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ({E: 40, N: 4, B: 4}, "is no multiple of gradient_accumulation_steps x train_micro_batch_size_per_gpu = 16"),
        ({E: "32", N: 4, B: 4}, "is no multiple"),
        ({E: 0, N: 4, B: 4}, "is no multiple"),
        ({E: 10, N: 4}, "train_batch_size 10 is not 2 ranks x 4 steps x B"),
        ({N: 4}, "or pass --micro-batch B"),
        ({N: "auto", B: "auto"}, "or pass --accum-steps N --micro-batch B"),
        ({N: 2.5, B: 4}, "is no positive whole number"),
        ({}, "no batch size is given"),
    ],
)
def test_batch_that_cannot_be_is_refused(written: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        verified_batch(written, 2, None, None)


def test_one_rank_is_no_plural() -> None:
    _, [note] = verified_batch({E: 32, N: 4, B: 4}, 1, None, None)
    assert note == "effective batch 32 of the JSON (2 ranks x 4 x 4) is verified as 16 on 1 rank (1 x 4 x 4)"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_buckets_leave_three_to_fill(stage: int) -> None:
    config = {"zero_optimization": {"stage": stage, "reduce_bucket_size": 1_000}}
    changed, [note] = with_small_buckets(config, [5_000, 4_000, 1_001], share=1.0)
    assert changed["zero_optimization"]["reduce_bucket_size"] == 1_000, "what is small already stays"
    other = "stage3_prefetch_bucket_size" if stage == 3 else "allgather_bucket_size"
    assert changed["zero_optimization"] == {"stage": stage, "reduce_bucket_size": 1_000, other: 3_334}
    assert note == f"buckets sized to the model: {other} 3,334"
    assert config == {"zero_optimization": {"stage": stage, "reduce_bucket_size": 1_000}}


@pytest.mark.parametrize(("ranks", "size"), [(1, 3_334), (2, 3_336), (3, 3_336), (4, 3_336), (5, 3_340), (8, 3_344)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_buckets_are_multiples_of_twice_the_ranks(stage: int, ranks: int, size: int) -> None:
    """ZeRO wants them so; 10,001 elements in three parts are 3,334, rounded up."""
    changed, notes = with_small_buckets({"zero_optimization": {"stage": stage}}, [5_000, 4_000, 1_001], 1.0, ranks)
    buckets = {key: value for key, value in changed["zero_optimization"].items() if key.endswith("bucket_size")}
    assert len(buckets) == 2
    assert set(buckets.values()) == {size}
    assert size % (2 * ranks) == 0
    assert len(notes) == 1


def test_buckets_of_a_large_model_and_of_zero_0_stay() -> None:
    written = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e6, "allgather_bucket_size": 5e6}}
    assert with_small_buckets(written, [124_000_000], share=1.0) == (written, [])
    assert with_small_buckets({"zero_optimization": {"stage": 0}}, [10], share=0.1)[1] == []
    assert with_small_buckets({}, [10], share=1.0) == ({}, [])


def test_a_shrunk_model_is_still_partitioned_at_zero_3() -> None:
    sizes = [24_576, 4_096, 4_096, 64, 64]
    changed, _ = with_small_buckets({"zero_optimization": {"stage": 3}}, sizes, share=0.02)
    threshold = changed["zero_optimization"]["stage3_param_persistence_threshold"]
    assert threshold == 2_000
    assert [size > threshold for size in sizes] == [True, True, True, False, False]
    tiny, _ = with_small_buckets({"zero_optimization": {"stage": 3}}, [64, 32], share=0.02)
    assert tiny["zero_optimization"]["stage3_param_persistence_threshold"] == 63
    whole, _ = with_small_buckets({"zero_optimization": {"stage": 3}}, sizes, share=1.0)
    assert "stage3_param_persistence_threshold" not in whole["zero_optimization"], "the user's own choice stays"
