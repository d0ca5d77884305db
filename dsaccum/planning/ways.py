"""Ways to run one experiment that need different amounts of memory, as changes of a DeepSpeed JSON."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Way:
    """What a plan may change.

    Attributes:
        stage: ZeRO stage.
        precision: as ``Numerics`` calls it.
        checkpointing: ``model.activation_checkpointing`` of the experiment.
    """

    stage: int
    precision: str
    checkpointing: bool

    def changes(self, asked: Way) -> list[str]:
        """What has to be written to come here from what was asked for."""
        changes = []
        if self.stage != asked.stage:
            changes.append(f'"zero_optimization": {{"stage": {self.stage}}}')
        if self.precision != asked.precision:
            changes.append('"bf16": {"enabled": true}')
        if self.checkpointing != asked.checkpointing:
            changes.append("model.activation_checkpointing: true")
        return changes


def other_ways(asked: Way) -> Iterator[Way]:
    """All that need less than what was asked for in some respect: later stages, bf16, checkpointing.

    Nearest first: by the number of changes, then by stage.
    """
    precisions = {asked.precision} | ({"bf16"} if asked.precision in ("fp32", "autocast bf16") else set())
    ways = [
        Way(stage, precision, checkpointing)
        for stage, precision, checkpointing in product(STAGES, precisions, (False, True))
        if stage >= asked.stage and checkpointing >= asked.checkpointing
    ]
    yield from sorted(
        (way for way in ways if way != asked),
        key=lambda way: (len(way.changes(asked)), way.precision != asked.precision, way.checkpointing, way.stage),
    )


def config_of(way: Way, asked: Way, config: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of a way, from that of what was asked for.

    In bf16 gradients add up in fp32 wherever DeepSpeed can do that, as in the shipped config for bf16.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(config))
    if way.stage != asked.stage:
        changed["zero_optimization"] = {**changed.get("zero_optimization", {}), "stage": way.stage}
    if way.precision != asked.precision:
        changed.pop("torch_autocast", None)
        changed["bf16"] = {"enabled": True}
        changed.pop("data_types", None)
        if way.stage > 0:
            changed["data_types"] = {"grad_accum_dtype": "fp32"}
    return changed


def stage_above(way: Way) -> Way | None:
    """The same with the next ZeRO stage."""
    return replace(way, stage=way.stage + 1) if way.stage < STAGES[-1] else None
