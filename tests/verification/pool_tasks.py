"""What the ranks of a pool under test are asked to do; they import this module, and not the tests."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from dsaccum.config.errors import ConfigError
from dsaccum.verification.ranks.interface import RankContext

SHORT_S = 3.0
"""The pool's limit to hangs."""


def sum_of_ranks(context: RankContext, factor: float) -> tuple[int, float]:
    import deepspeed.comm

    value = torch.tensor([factor * (context.ranks.rank + 1)])
    deepspeed.comm.all_reduce(value)
    return context.ranks.rank, value.item()


def process_id(context: RankContext) -> int:
    return os.getpid()


def count_aloud(context: RankContext, to: int) -> None:
    for number in range(to):
        context.send((context.ranks.rank, number))


def doubled(context: RankContext, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: 2 * tensor for name, tensor in tensors.items()}


def work_until(context: RankContext, end: Callable[[], None]) -> None:
    """All ranks come to micro-step 3 of step 2; there rank 1 meets its end, and the others wait for it."""
    context.at(2, 3, "forward")
    print(f"rank {context.ranks.rank} goes on")
    if context.ranks.rank == 1:
        end()
    dist.all_reduce(torch.ones(1))


def raise_value_error() -> None:
    raise ValueError("no such\nexpert")


def raise_config_error() -> None:
    raise ConfigError("is no number", source="a.yaml", key="run.seed", value=object(), fix="write 1")


def leave() -> None:
    os._exit(7)


def exit_like_a_script() -> None:
    sys.exit(1)


def sleep() -> None:
    time.sleep(600)


def never_give_python_back() -> None:
    """C code that keeps Python's lock: no other thread of the process runs any more."""
    sum(itertools.repeat(0))


def sleep_further_on(context: RankContext) -> None:
    """Rank 1 is ahead of rank 0, but it is rank 0 that waits for rank 1."""
    if context.ranks.rank == 1:
        context.at(1, 1, "backward")
        time.sleep(600)
    context.at(1, 1, "forward")
    dist.all_reduce(torch.ones(1))


def wait_for_one_that_is_done(context: RankContext) -> None:
    context.at(1, 1, "backward")
    if context.ranks.rank == 0:
        dist.all_reduce(torch.ones(1))


def work_slowly(context: RankContext) -> None:
    """Rank 0 waits longer than the limit, but rank 1 moves all the time."""
    for step in range(1, 6):
        if context.ranks.rank == 1:
            context.at(step, 1, "forward")
            time.sleep(SHORT_S / 3)
    dist.all_reduce(torch.ones(1))


def start_a_process_and_fail(context: RankContext, file: Path) -> None:
    file.with_suffix(f".{context.ranks.rank}").write_text(str(subprocess.Popen(["sleep", "600"]).pid))
    dist.barrier()
    raise ValueError
