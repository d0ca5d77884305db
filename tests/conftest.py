"""What all tests share: quiet libraries, one rank in this process, or several ranks of their own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsaccum.engine.process import Ranks, quiet_libraries

quiet_libraries()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Several processes share the cores already, and threads of OpenMP that wait for each other do so busily.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Two DeepSpeed versions that share a folder of compiled operations crash each other.
os.environ.setdefault(
    "TORCH_EXTENSIONS_DIR", str(Path(tempfile.gettempdir()) / f"dsaccum-test-extensions-{os.getuid()}")
)

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def one_rank() -> Iterator[Ranks]:
    """This process as the only rank, with its process group started."""
    from datetime import timedelta

    import torch.distributed as dist

    from dsaccum.engine.process import start_process_group

    ranks = Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1, launched=False)
    if not dist.is_initialized():
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        start_process_group(ranks, timedelta(seconds=60))
    yield ranks
    dist.destroy_process_group()
