"""The plan: what was asked for, whether it fits, with which split, and what else would fit at which price."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from dsaccum.batch import TOTAL_KEY, EffectiveBatch
from dsaccum.config.errors import ConfigError, located_in
from dsaccum.config.experiment import Experiment
from dsaccum.config.loading import load_experiment
from dsaccum.config.reading import read_json_object
from dsaccum.data.tokens import load_tokenizer
from dsaccum.planning.advice import advice_for
from dsaccum.planning.base_config import default_config, with_batch
from dsaccum.planning.engines.layout import Device
from dsaccum.planning.fakes import FakeRun
from dsaccum.planning.fit import Candidate, Split
from dsaccum.planning.flags import PlanFlags
from dsaccum.planning.record import (
    BatchRecord,
    ModelRecord,
    PhaseRecord,
    PlanRecord,
    PriceRecord,
    SplitRecord,
    WayRecord,
)
from dsaccum.planning.settings import EngineSettings
from dsaccum.planning.ways import Way, config_of, other_ways, stage_above

_SPLITS_SHOWN = 5
_FP32 = 4


@dataclass(frozen=True)
class Plan:
    """The record, and the JSON that carries it out; None where nothing fits."""

    record: PlanRecord
    config: dict[str, Any] | None


def make_plan(flags: PlanFlags, progress: Callable[[str], None] = lambda _: None) -> Plan:
    """Find out what fits.

    Raises:
        ConfigError: a file or a flag is wrong, or the model's memory cannot be known without running it.
    """
    began = time.perf_counter()
    planner = _Planner(flags, progress)
    asked = planner.way_record(planner.asked)
    chosen = planner.choose()
    others = [planner.way_record(candidate) for candidate in planner.others()]
    chosen_record = None if chosen is None else planner.way_record(chosen)
    batch = None if chosen is None else planner.batch(chosen)
    record = PlanRecord(
        fits=chosen is not None,
        experiment=str(flags.experiment),
        deepspeed=None if flags.deepspeed is None else str(flags.deepspeed),
        device=planner.device,
        memory_bytes=flags.memory,
        effective_batch=None if batch is None else BatchRecord(**vars(batch), total=batch.total),
        model=planner.model_record(),
        asked=asked,
        chosen=chosen_record,
        others=others,
        advice=advice_for(asked, chosen_record, others, flags.effective_batch, flags.ranks),
        versions=_versions(flags.version),
        command=list(flags.command),
        elapsed_s=time.perf_counter() - began,
    )
    return Plan(record, None if chosen is None or batch is None else with_batch(chosen.config, batch))


class _Planner:
    def __init__(self, flags: PlanFlags, progress: Callable[[str], None]) -> None:
        self._flags, self._progress = flags, progress
        self.device: Device = _device(flags.device)
        self.samples = _samples_of_one_rank(flags.effective_batch, flags.ranks)
        experiment = load_experiment(flags.experiment, flags.overrides)
        self._experiment = experiment
        tokenizer = load_tokenizer(experiment.data.tokenizer, flags.experiment)
        self._source = flags.deepspeed or flags.experiment
        self._run = FakeRun(experiment, tokenizer, flags.experiment)
        self._config = self._base(experiment)
        settings = self._settings(self._config)
        self._asked_way = Way(settings.stage, settings.numerics.precision, experiment.model.activation_checkpointing)
        self._candidates: dict[Way, Candidate] = {}
        self._best: dict[Way, Split | None] = {}
        progress("tracing one micro-step under fake tensors")
        self.asked = self._candidate(self._asked_way)

    def _base(self, experiment: Experiment) -> Mapping[str, Any]:
        given = self._flags.deepspeed
        if given is not None:
            return read_json_object(given)
        model = self._run.model(checkpointing=experiment.model.activation_checkpointing)
        return default_config(experiment, sum(parameter.numel() for parameter in model.parameters()))

    def _settings(self, config: Mapping[str, Any]) -> EngineSettings:
        with located_in(self._source):
            return EngineSettings.of(config, self.device)

    def _candidate(self, way: Way) -> Candidate:
        if way not in self._candidates:
            config = config_of(way, self._asked_way, self._config)
            self._candidates[way] = Candidate(
                way,
                config,
                self._settings(config),
                self._run,
                sequence_length=self._experiment.data.sequence_length,
                world_size=self._flags.ranks,
                samples=self.samples,
            )
        return self._candidates[way]

    def best(self, candidate: Candidate) -> Split | None:
        """The split with the smallest N that fits."""
        if candidate.way not in self._best:
            self._best[candidate.way] = candidate.best(self._flags.memory)
        return self._best[candidate.way]

    def choose(self) -> Candidate | None:
        """What was asked for; where no JSON says which ZeRO stage, the lowest that fits."""
        way: Way | None = self._asked_way
        while way is not None:
            candidate = self._candidate(way)
            if self.best(candidate) is not None:
                return candidate
            way = stage_above(way) if self._flags.deepspeed is None else None
        return None

    def others(self) -> list[Candidate]:
        """What else could be done."""
        self._progress("looking for what else fits")
        can_checkpoint = getattr(self._run.model(checkpointing=False), "supports_gradient_checkpointing", False)
        return [
            self._candidate(way)
            for way in other_ways(self._asked_way)
            if can_checkpoint or way.checkpointing == self._asked_way.checkpointing
        ]

    def batch(self, candidate: Candidate) -> EffectiveBatch | None:
        """E = W x N x B of a way's best split."""
        best = self.best(candidate)
        if best is None:
            return None
        return EffectiveBatch(self._flags.ranks, best.accumulation_steps, best.micro_batch)

    def model_record(self) -> ModelRecord:
        """Sizes."""
        model = self._run.model(checkpointing=self._asked_way.checkpointing)
        parameters = list(model.parameters())
        return ModelRecord(
            class_name=type(model).__name__,
            parameters=sum(p.numel() for p in parameters),
            trained=sum(p.numel() for p in parameters if p.requires_grad),
            logits_bytes_per_sample=_FP32 * self._experiment.data.sequence_length * self._run.vocabulary,
        )

    def way_record(self, candidate: Candidate) -> WayRecord:
        """A way with its splits and its price."""
        best, one = self.best(candidate), candidate.split(1)
        shown = best or one
        settings = candidate.settings
        price = candidate.communicated(shown.accumulation_steps)
        memory = self._flags.memory
        return WayRecord(
            zero_stage=candidate.way.stage,
            precision=candidate.way.precision,
            accumulation_dtype=settings.numerics.accumulation,
            activation_checkpointing=candidate.way.checkpointing,
            reduce_bucket_bytes=settings.reduce_bucket_bytes,
            changes=candidate.way.changes(self._asked_way),
            fits=best is not None,
            best=None if best is None else _split_record(best),
            largest_micro_batch=candidate.largest(memory),
            short_bytes=max(0, one.peaks.peak.total - memory),
            splits=[_split_record(candidate.split(rows)) for rows in self._shown(best)],
            price=PriceRecord(
                compute=candidate.flops(2) / max(self.asked.flops(2), 1),
                gradient_bytes=price["gradients"],
                parameter_bytes=price["parameters"],
            ),
        )

    def _shown(self, best: Split | None) -> list[int]:
        """Values of B: the best one, the next larger, and smaller ones."""
        divisors = [rows for rows in range(1, self.samples + 1) if self.samples % rows == 0]
        place = 0 if best is None else divisors.index(best.micro_batch)
        return divisors[max(0, place - _SPLITS_SHOWN + 2) : place + 2][::-1]


def _device(stated: str | None) -> Device:
    on_gpu = torch.cuda.is_available() if stated is None else stated == "cuda"
    return "cuda" if on_gpu else "cpu"


def _samples_of_one_rank(effective_batch: int, ranks: int) -> int:
    for flag, value in (("--effective-batch", effective_batch), ("--ranks", ranks)):
        if value < 1:
            raise ConfigError("must be at least 1", key=flag, value=value, fix=f"{flag} 1")
    if effective_batch % ranks:
        below = effective_batch - effective_batch % ranks
        nearest = f"{below} or {below + ranks}" if below else str(ranks)
        problem = f"{TOTAL_KEY} {effective_batch} is not {ranks} ranks x N steps x B for any whole N and B"
        raise ConfigError(problem, source="--effective-batch", fix=f"--effective-batch {nearest}")
    return effective_batch // ranks


def _split_record(split: Split) -> SplitRecord:
    phases = {
        phase: PhaseRecord(peak_bytes=moment.total, by_category=dict(moment.by_category))
        for phase, moment in split.peaks.by_phase.items()
    }
    peak = split.peaks.peak.total
    return SplitRecord(
        micro_batch=split.micro_batch,
        accumulation_steps=split.accumulation_steps,
        peak_bytes=peak,
        phase=split.peaks.phase,
        phases=phases,
    )


def _versions(own: str) -> dict[str, str]:
    found = {"dsaccum": own}
    for name in ("torch", "deepspeed", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
