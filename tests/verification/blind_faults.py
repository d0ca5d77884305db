"""Mistakes of a tester who had not seen the code, for ``--inject blind_faults.py:<name>``: one statement each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from dsaccum.verification.cases.case import Case
from dsaccum.verification.subject.faults import Fault
from dsaccum.verification.subject.faults.fault import replaced
from dsaccum.verification.subject.loops import Subject

Plant = Callable[[Subject], AbstractContextManager[None]]


class Planted(Fault):
    """A fault from a function that plants it."""

    def __init__(self, plant: Plant) -> None:
        name = plant.__name__.strip("_").replace("_", "-")
        super().__init__(id=name, summary=(plant.__doc__ or name).strip())
        object.__setattr__(self, "plant", plant)

    @contextmanager
    def planted(self, subject: Subject, case: Case) -> Iterator[None]:
        with self.plant(subject):
            yield


def _fault(plant: Plant) -> Callable[[], Fault]:
    return lambda: Planted(plant)


def _named(subject: Subject, ending: str) -> Any:
    return next(each for name, each in subject.engine.module.named_parameters() if name.endswith(ending))


@_fault
def leaves_last_out(subject: Subject) -> AbstractContextManager[None]:
    """The last tensor of the reduction is left out of it."""
    engine = subject.engine
    reduce = engine.allreduce_no_retain

    def but_the_last(bucket: Any, *arguments: Any, **keywords: Any) -> Any:
        return reduce(list(bucket)[:-1], *arguments, **keywords)

    return replaced(engine, "allreduce_no_retain", but_the_last)


@_fault
def leaves_first_out(subject: Subject) -> AbstractContextManager[None]:
    """The first, which is the embedding and most of the gradient."""
    engine = subject.engine
    reduce = engine.allreduce_no_retain

    def but_the_first(bucket: Any, *arguments: Any, **keywords: Any) -> Any:
        return reduce(list(bucket)[1:], *arguments, **keywords)

    return replaced(engine, "allreduce_no_retain", but_the_first)


@_fault
def keeps_one_gradient(subject: Subject) -> AbstractContextManager[None]:
    """Clearing skips one parameter."""
    engine = subject.engine

    def all_but_one() -> None:
        for name, parameter in engine.module.named_parameters():
            if not name.endswith("ln_f.bias"):
                parameter.grad = None

    return replaced(engine, "zero_grad", all_but_one)


def _after_backward(subject: Subject, micro_step: int, do: Callable[[], None]) -> AbstractContextManager[None]:
    engine = subject.engine
    backward = engine.backward

    def then_do(*arguments: Any, **keywords: Any) -> Any:
        at = engine.micro_steps % subject.accumulation_steps + 1
        result = backward(*arguments, **keywords)
        if at == micro_step:
            do()
        return result

    return replaced(engine, "backward", then_do)


@_fault
def loses_two_micro_steps_of_one(subject: Subject) -> AbstractContextManager[None]:
    """One parameter's gradient is cleared after the second of the micro-steps."""
    parameter = _named(subject, "h.0.attn.c_attn.weight")
    return _after_backward(subject, 2, lambda: setattr(parameter, "grad", None))


@contextmanager
def _hooked(parameter: Any, hook: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    handle = parameter.register_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@_fault
def halves_one(subject: Subject) -> AbstractContextManager[None]:
    """One parameter gets half of what is due."""
    return _hooked(_named(subject, "h.0.attn.c_attn.weight"), lambda gradient: gradient / 2)


@_fault
def turns_one_around(subject: Subject) -> AbstractContextManager[None]:
    """One parameter's gradient is wrong in no way that has a name."""
    return _hooked(_named(subject, "h.0.attn.c_attn.weight"), lambda gradient: gradient.flip(0))


@_fault
def rounds_for_the_ranks(subject: Subject) -> AbstractContextManager[None]:
    """A compression hook: gradients are bf16 while they are averaged."""
    engine = subject.engine
    reduce = engine.allreduce_bucket

    def rounded(bucket: Any, *arguments: Any, **keywords: Any) -> Any:
        return reduce([tensor.bfloat16().float() for tensor in bucket], *arguments, **keywords)

    return replaced(engine, "allreduce_bucket", rounded)


@_fault
def clips_what_there_is(subject: Subject) -> AbstractContextManager[None]:
    """After each backward, to a limit that is not the JSON's."""
    engine = subject.engine
    backward = engine.backward

    def then_clip(*arguments: Any, **keywords: Any) -> Any:
        result = backward(*arguments, **keywords)
        torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 0.3)
        return result

    return replaced(engine, "backward", then_clip)


@_fault
def schedules_before_the_step(subject: Subject) -> AbstractContextManager[None]:
    """lr_scheduler.step(), then optimizer.step()."""
    engine = subject.engine
    take = engine._take_model_step

    def scheduled(*arguments: Any, **keywords: Any) -> Any:
        scheduler = engine.lr_scheduler
        scheduler.step()
        with replaced(engine, "lr_scheduler", None):
            return take(*arguments, **keywords)

    return replaced(engine, "_take_model_step", scheduled)


def _clear_states(subject: Subject) -> None:
    if subject.ranks.rank == subject.ranks.world_size - 1:
        for state in subject.engine.optimizer.state.values():
            for key in {"exp_avg", "exp_avg_sq"} & set(state):
                state[key].zero_()


def _around_second_step(subject: Subject, *, before: bool) -> AbstractContextManager[None]:
    optimizer = subject.engine.optimizer
    step, taken = optimizer.step, []

    def stepped(*arguments: Any, **keywords: Any) -> Any:
        taken.append(1)
        if len(taken) == 2 and before:
            _clear_states(subject)
        result = step(*arguments, **keywords)
        if len(taken) == 2 and not before:
            _clear_states(subject)
        return result

    return replaced(optimizer, "step", stepped)


@_fault
def loses_states_before_the_step(subject: Subject) -> AbstractContextManager[None]:
    """The last rank's part of Adam's moments is zeroed before their use."""
    return _around_second_step(subject, before=True)


@_fault
def loses_states_after_the_step(subject: Subject) -> AbstractContextManager[None]:
    """And after it."""
    return _around_second_step(subject, before=False)
