"""Loops as users might write them, each with something that a witness must see; see ``--loop FILE.py:function``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

kept: list[Any] = []


def sound(engine: Any, micro_batch: Mapping[str, Tensor]) -> Tensor:
    return engine(**micro_batch).loss


def reduces_one_tensor(engine: Any, micro_batch: Mapping[str, Tensor]) -> Tensor:
    """Averages the first parameter's gradient itself, at every micro-step but the first, where there is none yet."""
    first = next(engine.module.parameters())
    if first.grad is not None:
        dist.all_reduce(first.grad)
        first.grad /= dist.get_world_size()
    return sound(engine, micro_batch)


def reduces_on_another_thread(engine: Any, micro_batch: Mapping[str, Tensor]) -> Tensor:
    """Where no dispatch mode looks; DeepSpeed's comms logger does."""
    import deepspeed.comm as comm

    _on_a_thread(lambda: comm.all_reduce(torch.ones(1000)))
    return sound(engine, micro_batch)


def gathers_objects(engine: Any, micro_batch: Mapping[str, Tensor]) -> Tensor:
    """The comms logger, left to itself, ends the process here."""
    import deepspeed.comm as comm

    comm.all_gather_object([None] * dist.get_world_size(), {"rank": dist.get_rank()})
    return sound(engine, micro_batch)


def sums_its_loss(engine: Any, micro_batch: Mapping[str, Tensor]) -> Tensor:
    """As people do for their log: control traffic."""
    loss = sound(engine, micro_batch)
    dist.all_reduce(loss.detach().clone())
    return loss


def steps_twice(engine: Any, micro_batch: Mapping[str, Tensor]) -> Tensor:
    """Once here, once where it belongs."""
    engine.step()
    return sound(engine, micro_batch)


def two_forwards(engine: Any, micro_batch: Mapping[str, Tensor]) -> Tensor:
    return (sound(engine, micro_batch) + sound(engine, micro_batch)) / 2


def keeps_logits(engine: Any, micro_batch: Mapping[str, Tensor]) -> Tensor:
    """Detached, so without their graph, and still in the way."""
    outputs = engine(**micro_batch)
    kept.append(outputs.logits.detach())
    return outputs.loss


def _on_a_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()
