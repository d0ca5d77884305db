"""Loops as users might write them, each with something that a witness must see; see ``--loop FILE.py:function``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dsaccum.data.samples import NOT_A_TARGET
from dsaccum.loss import model_inputs

kept: list[Any] = []


def sound(engine: Any, micro_batch: Mapping[str, Tensor]) -> Tensor:
    return engine(**micro_batch).loss


def seeds_every_micro_step(engine: Any, micro_batch: Mapping[str, Tensor]) -> Tensor:
    """So that a run can be repeated, its author believes."""
    torch.manual_seed(0)
    return sound(engine, micro_batch)


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


def weighs_by_the_window(engine: Any, micro_batch: Mapping[str, Tensor], window_targets: int) -> Tensor:
    """Right on ragged rows, too: N W (sum of losses) / (targets of the window)."""
    logits = engine(**model_inputs(micro_batch)).logits[:, :-1].float()
    total = F.cross_entropy(logits.flatten(0, 1), micro_batch["labels"][:, 1:].flatten(), reduction="sum")
    return total * engine.gradient_accumulation_steps() * dist.get_world_size() / window_targets


def clears_all_gradients(engine: Any, micro_batch: Mapping[str, Tensor]) -> Tensor:
    engine.optimizer.zero_grad(set_to_none=True)
    return sound(engine, micro_batch)


def leaves_cycles(engine: Any, micro_batch: Mapping[str, Tensor]) -> Tensor:
    """Garbage that only Python's collector can free, whenever it gets to it."""
    outputs = engine(**micro_batch)
    cycle: list[Any] = [outputs.logits.detach()]
    cycle.append(cycle)
    return outputs.loss


def keeps_losses(engine: Any, micro_batch: Mapping[str, Tensor]) -> Tensor:
    """Costs next to nothing: backward frees what their graphs hold."""
    kept.append(sound(engine, micro_batch))
    return kept[-1]


def returns_no_graph(engine: Any, micro_batch: Mapping[str, Tensor]) -> Tensor:
    return sound(engine, micro_batch).detach()


def returns_logits(engine: Any, micro_batch: Mapping[str, Tensor]) -> Tensor:
    return engine(**micro_batch).logits


def mistypes(engine: Any, micro_batch: Mapping[str, Tensor]) -> Tensor:
    return sound(engine, {"input_ids": micro_batch["input"]})


def trims_and_splits(engine: Any, micro_batch: Mapping[str, Tensor]) -> Tensor:
    """One forward for each row, without the filling at its right end: the same sum over the same count."""
    counted = (micro_batch["labels"][:, 1:] != NOT_A_TARGET).sum()
    total: Any = 0.0
    for row in range(len(micro_batch["labels"])):
        length = int((micro_batch["labels"][row] != NOT_A_TARGET).sum())
        part = {name: field[row : row + 1, :length] for name, field in micro_batch.items()}
        logits = engine(**model_inputs(part)).logits[:, :-1].float()
        total = total + F.cross_entropy(logits.flatten(0, 1), part["labels"][:, 1:].flatten(), reduction="sum")
    return total / counted


def changes_its_batch(engine: Any, micro_batch: Mapping[str, Tensor]) -> Tensor:
    """In place: the first label of a row, which no token predicts."""
    micro_batch["labels"][:, 0] = NOT_A_TARGET
    return sound(engine, micro_batch)


def steps_the_optimizer(engine: Any, micro_batch: Mapping[str, Tensor]) -> Tensor:
    """Past the engine, which goes on counting. From ZeRO 1 on, DeepSpeed itself raises KeyError."""
    if not engine.is_gradient_accumulation_boundary():
        engine.optimizer.step()
    return sound(engine, micro_batch)


def clears_one_gradient(engine: Any, micro_batch: Mapping[str, Tensor]) -> Tensor:
    """Of one parameter, at each micro-step: its last micro-batch is left."""
    list(engine.module.parameters())[4].grad = None
    return sound(engine, micro_batch)


def multiplies_and_clears_one(engine: Any, micro_batch: Mapping[str, Tensor]) -> Tensor:
    return clears_one_gradient(engine, micro_batch) * engine.gradient_accumulation_steps()


def shrinks_a_parameter(engine: Any, micro_batch: Mapping[str, Tensor]) -> Tensor:
    """Before each window, as a hand-made weight decay or a target network's copy would."""
    if engine.micro_steps % engine.gradient_accumulation_steps() == 0:
        with torch.no_grad():
            list(engine.module.parameters())[4].mul_(0.999)
    return sound(engine, micro_batch)


def forgets_a_state(engine: Any, micro_batch: Mapping[str, Tensor]) -> Tensor:
    """Adam's second moment of one parameter, before each window."""
    if engine.micro_steps % engine.gradient_accumulation_steps() == 0:
        for state in list(engine.optimizer.state.values())[:1]:
            state["exp_avg_sq"].zero_()
    return sound(engine, micro_batch)
