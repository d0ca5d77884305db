"""What the installed DeepSpeed and the machine can do, as plain data: filled in where deepspeed may be imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

Rehearsal = Callable[[dict[str, Any], int], list[float]]
"""Parse a resolved config as DeepSpeed does, build its scheduler, and return the rates of the first updates."""


@dataclass(frozen=True)
class Machine:
    """What decides whether a config can run here.

    Args:
        device: what the model is trained on.
        has_compiler: a C++ compiler is on PATH, so DeepSpeed can compile its own operations.
        supports_fp16: DeepSpeed accepts fp16 on this device.
    """

    device: Literal["cpu", "cuda"]
    has_compiler: bool
    supports_fp16: bool


@dataclass(frozen=True)
class SectionSchema:
    """One object of the JSON.

    Args:
        defaults: the known keys, each with the default that DeepSpeed reads; the default's type is the type that
            is expected, None where DeepSpeed says nothing about it.
        model: DeepSpeed's own pydantic model of the section, where it has one.
    """

    defaults: Mapping[str, Any]
    model: type[BaseModel] | None = None


@dataclass(frozen=True)
class CallSchema:
    """What an optimizer or scheduler can be given.

    Args:
        defaults: names of its parameters, with their defaults.
        required: names that have no default.
    """

    defaults: Mapping[str, Any]
    required: frozenset[str] = frozenset()

    @property
    def parameters(self) -> frozenset[str]:
        """All names."""
        return self.required | self.defaults.keys()


@dataclass(frozen=True)
class DeepSpeedSchema:
    """The JSON as the installed DeepSpeed reads it.

    Args:
        version: of the installed DeepSpeed.
        top_level: the known keys of the whole object.
        sections: the known keys of nested objects, by dotted path.
        removed: keys that this version refuses, with its reason.
        own_optimizers: those that DeepSpeed builds itself, by lower-case name: it ignores case.
        torch_optimizers: classes of ``torch.optim``, by exact name.
        tested_with_zero: the torch optimizers that ZeRO takes without ``zero_allow_untested_optimizer``.
        schedulers: of DeepSpeed and of torch, by exact name.
        machine: where it would run.
        rehearse: DeepSpeed's own parser and schedulers, tried on a resolved config; raises what they raise.
    """

    version: str
    top_level: SectionSchema
    sections: Mapping[str, SectionSchema]
    removed: Mapping[str, str]
    own_optimizers: Mapping[str, CallSchema]
    torch_optimizers: Mapping[str, CallSchema]
    tested_with_zero: frozenset[str]
    schedulers: Mapping[str, CallSchema]
    machine: Machine
    rehearse: Rehearsal
