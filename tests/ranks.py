"""Several ranks for one test: each a process of its own, with real collectives; results come back by rank."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from dsaccum.engine.process import Ranks, limit_threads, quiet_libraries, start_process_group


def run_on_ranks(function: Callable[..., Any], world_size: int, folder: Path, *arguments: Any) -> list[Any]:
    """Call ``function(ranks, *arguments)`` on each rank; returns what each returned. Fails when any rank fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_rank_main, args=(world_size, port, folder, function, arguments), nprocs=world_size)
    return [pickle.loads((folder / f"rank{rank}.pickle").read_bytes()) for rank in range(world_size)]


def _rank_main(
    rank: int, world_size: int, port: int, folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    quiet_libraries()
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    ranks = Ranks(rank, world_size, rank, world_size, launched=False)
    limit_threads(ranks)
    start_process_group(ranks, timedelta(seconds=120))
    result = function(ranks, *arguments)
    (folder / f"rank{rank}.pickle").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()  # else gloo's threads outlive the interpreter, and C++ aborts the process now and then
