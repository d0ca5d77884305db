"""FSDP2 on two ranks: right loops pass, mistakes are named, and parameters at the end are the same to the bit.

Run: pytest tests/watch/test_fsdp.py -n 0. Right and wrong runs of one script are each other's control. Not covered:
GPUs, meshes of more dimensions, mixed precision, which are refused.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from dsaccum.watch.fsdp import NotGathered, group_of
from tests.watch.running import on_ranks, only_window, watched
from tests.watch.test_same_run import pairs_on_two_ranks


def test_a_right_loop_on_one_rank(one_rank: object) -> None:
    record = watched("fsdp_loop", "--no-sync")
    window = only_window(record)
    assert (record.engines[0].kind, record.engines[0].model.class_name) == ("FSDP2", "LlamaForCausalLM")
    assert window.verdict == "equivalent"
    assert window.claims.which("untested") == ["communication"]


@pytest.mark.slow
@pytest.mark.distributed
def test_a_right_loop_and_one_that_divides_twice(tmp_path: Path) -> None:
    right, wrong = on_ranks(2, [["fsdp_loop", "--no-sync"], ["fsdp_loop", "--mistake", "divided-twice"]], tmp_path)
    window = only_window(right)
    assert right.engines[0].kind == "FSDP2"
    assert window.verdict == "equivalent"
    assert window.claims.which("fail") == window.claims.which("untested") == []
    assert only_window(wrong).causes[0].id == "loss-scaled-twice"
    assert right.unproven == wrong.unproven == []


@pytest.mark.slow
@pytest.mark.distributed
def test_more_loops(tmp_path: Path) -> None:
    cases = {
        "--ragged": None,
        "--ragged --no-sync": None,
        "--ragged --mistake mean-of-means": "mean-of-means",
        "--mistake clip-each": "clipped-every-micro-step",
    }
    records = on_ranks(2, [["fsdp_loop", *case.split()] for case in cases], tmp_path)
    named = [next(iter(cause.id for cause in only_window(record).causes), None) for record in records]
    assert named == list(cases.values())
    assert [record.verdict for record in records[:2]] == ["equivalent", "equivalent"]


@pytest.mark.slow
@pytest.mark.distributed
def test_parameters_are_the_same_watched(tmp_path: Path) -> None:
    cases = ["fsdp_loop", "fsdp_loop --no-sync", "fsdp_loop --mistake clip-each", "fsdp_loop --mixed"]
    assert pairs_on_two_ranks(cases, tmp_path) == []


@pytest.mark.slow
@pytest.mark.distributed
def test_mixed_precision_is_refused_with_the_reason(tmp_path: Path) -> None:
    [record] = on_ranks(2, [["fsdp_loop", "--mixed"]], tmp_path)
    assert record.engines == []
    assert record.unproven == ["not watched: FSDP2 in mixed precision; the script goes on"]


def test_what_is_not_sharded_has_no_group() -> None:
    assert group_of(nn.Linear(2, 2)) is None


def test_the_first_fsdp_is_refused_with_the_reason() -> None:
    class FullyShardedDataParallel(nn.Module):
        pass

    with pytest.raises(NotGathered, match="only fully_shard"):
        group_of(nn.Sequential(FullyShardedDataParallel(), nn.Linear(2, 2)))
    assert torch.distributed.is_available()
