"""This process among the ranks: environment, threads, process group. Everything that must stand before an engine."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

SHARED_MEMORY_OP = "deepspeed_shm_comm"


@dataclass(frozen=True)
class Ranks:
    """Where this process stands, as its launcher says (deepspeed, torchrun, or none: one rank)."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launched: bool
    """By a launcher that waits for it, rather than by hand."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Ranks:
        """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE (the DeepSpeed launcher says LOCAL_SIZE)."""
        world_size = int(environment.get("WORLD_SIZE", 1))
        local = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE") or world_size
        return cls(
            rank=int(environment.get("RANK", 0)),
            world_size=world_size,
            local_rank=int(environment.get("LOCAL_RANK", 0)),
            local_world_size=int(local),
            launched="RANK" in environment,
        )

    @property
    def is_first(self) -> bool:
        """Rank 0 speaks for all."""
        return self.rank == 0


def quiet_libraries() -> None:
    """Silence the start-up chatter of DeepSpeed and transformers; warnings and errors still come through.

    Call before either is imported: DeepSpeed logs while it is imported.
    """
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\..*|deepspeed\..*")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)


def let_idle_threads_sleep() -> None:
    """Have threads of OpenMP that wait for each other sleep rather than spin, unless the user decided on it.

    A spinning thread keeps a core from the one that it waits for, where several processes share the cores: on 2 busy
    cores a run took 6 times as long. Call before torch is imported: OpenMP reads it once.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def limit_threads(ranks: Ranks) -> int:
    """Share this machine's cores among its ranks, unless the user set OMP_NUM_THREADS; returns threads per rank."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // ranks.local_world_size))
    return torch.get_num_threads()


@contextmanager
def computing_threads(count: int) -> Iterator[None]:
    """Inside, torch computes with this many threads: for small tensors one is faster than several that wait for it."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def seed_draws(seed: int, ranks: Ranks) -> None:
    """Let each rank draw numbers of its own, the same ones in each run: dropout masks must not repeat on the ranks.

    Called once all ranks have drawn the same initial weights.
    """
    import random

    import numpy as np
    import torch

    own = seed + 1 + ranks.rank
    torch.manual_seed(own)
    random.seed(own)
    np.random.seed(own % 2**32)


def start_process_group(ranks: Ranks, timeout: timedelta) -> None:
    """Join the other ranks through DeepSpeed (gloo on CPUs, NCCL on GPUs).

    Args:
        ranks: this process's place.
        timeout: how long to wait for ranks that don't come, and for any collective.

    Raises:
        torch.distributed.DistError: the ranks did not all come within the timeout, or cannot reach each other.
    """
    import deepspeed

    if ranks.world_size == 1:
        _be_the_only_rank(ranks)
    deepspeed.accelerator.get_accelerator().set_device(
        ranks.local_rank
    )  # objects are exchanged before an engine sets it
    _never_compile_shared_memory_op()
    deepspeed.init_distributed(timeout=timeout, auto_mpi_discovery=False, verbose=False)


def _be_the_only_rank(ranks: Ranks) -> None:
    os.environ.setdefault("RANK", str(ranks.rank))
    os.environ.setdefault("WORLD_SIZE", str(ranks.world_size))
    os.environ.setdefault("LOCAL_RANK", str(ranks.local_rank))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_PORT" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(probe.getsockname()[1])


def _never_compile_shared_memory_op() -> None:
    """Keep DeepSpeed's CPU backend from compiling an operation that training never uses (35 s, needs a compiler).

    DeepSpeed builds it only where ``deepspeed.ops.__compatible_ops__`` lists it. Newer versions fill that dict at its
    first use, by running compilers; a dict that stands there already is taken as it is.
    """
    import deepspeed

    compatible = vars(deepspeed.ops).setdefault("__compatible_ops__", {})
    compatible[SHARED_MEMORY_OP] = False
