"""The largest micro-batch with which a way of running fits into a given memory, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dsaccum.instruments.traffic import BARE, BF16, HALF, ZERO, TrafficPlan, expected_gradient_bytes
from dsaccum.planning.engines.bf16_optimizer import BF16Optimizer
from dsaccum.planning.engines.engine import Engine
from dsaccum.planning.engines.layout import Layout
from dsaccum.planning.engines.partitioned import Partitioned, Partitions
from dsaccum.planning.engines.sharded import Sharded
from dsaccum.planning.engines.unpartitioned import HalfUnfused
from dsaccum.planning.fakes import FakeRun
from dsaccum.planning.prediction import EngineWindow, Peaks, distinct_steps
from dsaccum.planning.settings import EngineSettings
from dsaccum.planning.trace import AffineMicroStep
from dsaccum.planning.ways import Way

_TOKEN_BYTES = 8


@dataclass(frozen=True)
class Split:
    """One way of splitting the effective batch, and what it needs.

    Attributes:
        micro_batch: B.
        accumulation_steps: N.
        peaks: of the rank that needs most.
    """

    micro_batch: int
    accumulation_steps: int
    peaks: Peaks


class Candidate:
    """One way of running, with all its splits.

    Args:
        way: stage, precision, checkpointing.
        config: its DeepSpeed JSON.
        settings: what the JSON says about memory.
        run: the experiment under fake tensors.
        sequence_length: T.
        world_size: W.
        samples: of one rank in a window, E / W.
    """

    def __init__(
        self,
        way: Way,
        config: Mapping[str, Any],
        settings: EngineSettings,
        run: FakeRun,
        *,
        sequence_length: int,
        world_size: int,
        samples: int,
    ) -> None:
        self.way, self.config, self.settings = way, config, settings
        self._run, self._length, self._world_size, self.samples = run, sequence_length, world_size, samples
        self._windows: dict[tuple[int, int], EngineWindow] = {}

    @cached_property
    def micro_step(self) -> AffineMicroStep:
        """What a micro-step has in memory, for every B."""
        return self._run.micro_step(self.settings.numerics.precision, checkpointing=self.way.checkpointing)

    def split(self, micro_batch: int, accumulation_steps: int | None = None) -> Split:
        """The split with B samples in a micro-batch; N is E / (W B) unless told otherwise."""
        steps = self.samples // micro_batch if accumulation_steps is None else accumulation_steps
        micro_step = self.micro_step.at(micro_batch)
        # On a CPU the whole window's micro-batches lie where the model is, on a GPU one at a time.
        rows = micro_batch * (steps if self.settings.device == "cpu" else 1)
        data = self._run.fields * _TOKEN_BYTES * self._length * rows
        peaks = [self._window(rank, steps).peaks(micro_step, data) for rank in self._ranks]
        return Split(micro_batch, steps, max(peaks, key=lambda each: each.peak.total))

    def best(self, memory: int) -> Split | None:
        """The split with the largest B that divides E / W and fits, i.e. with the smallest N."""
        for micro_batch in range(self.samples, 0, -1):
            if self.samples % micro_batch == 0 and self.micro_step.at(micro_batch).alive.max() <= memory:
                split = self.split(micro_batch)
                if split.peaks.peak.total <= memory:
                    return split
        return None

    def largest(self, memory: int) -> int:
        """The largest B that fits with several micro-steps, whether it divides anything or not; at most E / W."""
        fits, too_large = 0, self.samples + 1
        while too_large - fits > 1:
            middle = (fits + too_large) // 2
            if self.split(middle, 2).peaks.peak.total <= memory:
                fits = middle
            else:
                too_large = middle
        return fits

    @cached_property
    def _ranks(self) -> list[int]:
        """Whose memory is looked at: ranks differ at ZeRO 1 and 2 only, in what lies in their partitions and when."""
        if self.settings.stage not in (1, 2) or self._world_size == 1:
            return [0]
        # The last one's partition fills first, while activations are at their highest.
        layout = self.settings.layout(self._model, self._world_size, 0)
        copied = [partitions.touched for partitions in Partitions.of_all(layout)]
        return sorted({copied.index(max(copied)), self._world_size - 1})

    def _window(self, rank: int, steps: int) -> EngineWindow:
        key = (rank, distinct_steps(steps, overlaps=self.settings.overlaps))
        if key not in self._windows:
            engine = self.settings.engine(self._model, self._world_size, rank)
            self._windows[key] = EngineWindow.of(engine, self.micro_step.fixed, steps)
        return self._windows[key]

    @property
    def _model(self) -> Any:
        return self._run.model(checkpointing=self.way.checkpointing)

    def flops(self, micro_batch: int) -> int:
        """Floating-point operations per sample, at this B."""
        return int(self.micro_step.at(micro_batch).flops.sum()) // micro_batch

    def communicated(self, steps: int) -> dict[str, int]:
        """Bytes of one optimizer step on one rank: gradients handed in to be reduced, parameters gathered."""
        if self._world_size == 1:
            return {"gradients": 0, "parameters": 0}
        engine = self.settings.engine(self._model, self._world_size, 0)
        layout = engine.layout
        gradients = expected_gradient_bytes(_traffic_plan(engine, layout))
        times = steps if layout.stage >= 2 else 1
        gathered = 0
        if isinstance(engine, Sharded):
            EngineWindow.of(engine, self.micro_step.fixed, 1)
            gathered = engine.gathered_bytes * steps
        elif isinstance(engine, Partitioned | BF16Optimizer):
            gathered = layout.weight_bytes * Partitions.of(layout).flat
        return {"gradients": gradients * times, "parameters": gathered}


def _traffic_plan(engine: Engine, layout: Layout) -> TrafficPlan:
    kind = BARE
    if isinstance(engine, BF16Optimizer):
        kind = BF16
    elif isinstance(engine, HalfUnfused):
        kind = HALF
    elif isinstance(engine, Partitioned | Sharded):
        kind = ZERO
    widths = tuple(layout.communication_bytes(parameter) for parameter in layout.trained)
    return TrafficPlan(
        stage=layout.stage,
        wrapper=kind,
        groups=(tuple(layout.trained.values()),),
        itemsize=max(widths),
        itemsizes=(widths,),
        world_size=layout.world_size,
        accumulation_steps=1,
        clipping=layout.clipping,
    )
