"""Ranks compare what they were given before they work together: on several machines it need not be the same."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from dsaccum.config.errors import ConfigError
from dsaccum.engine.process import Ranks


def check_same_everywhere(given: Mapping[str, Any], ranks: Ranks) -> None:
    """One all-gather.

    Args:
        given: by name; what must be equal on all ranks (JSON types).
        ranks: this process's place.

    Raises:
        ConfigError: on all ranks alike; names the field, both values, ranks and hosts.
    """
    everyone: list[tuple[str, Mapping[str, Any]]] = [("", {})] * ranks.world_size
    dist.all_gather_object(everyone, (socket.gethostname(), dict(given)))
    first_host, first = everyone[0]
    for rank, (host, other) in enumerate(everyone):
        for name in [*first, *(name for name in other if name not in first)]:
            if first.get(name) != other.get(name):
                raise ConfigError(
                    f"rank {rank} on {host} has {other.get(name)!r}, rank 0 on {first_host} has {first.get(name)!r}",
                    key=name,
                    fix="the same files and the same installation on every machine",
                )
