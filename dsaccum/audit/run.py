"""The audit: the user's own config in every way of calling DeepSpeed, then the chosen cells one after another."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dsaccum.audit.attempt import join
from dsaccum.audit.cells import (
    ACCUMULATION_STEPS,
    OPTIMIZERS,
    PRECISIONS,
    Abilities,
    Cell,
    Circumstances,
    every_cell,
    pairwise_cells,
    why_untested,
)
from dsaccum.audit.finding import recorded, refused, try_cell
from dsaccum.audit.record import AuditRecord, CellRecord, CircumstancesRecord, OwnRecord, UntestedRecord
from dsaccum.audit.small_case import CLIPPING_KEY, prepare_cell, prepare_own
from dsaccum.audit.ways import WAYS, Way
from dsaccum.config.errors import ConfigError, located_in
from dsaccum.config.reading import read_json_object
from dsaccum.config.schema import DeepSpeedSchema
from dsaccum.engine.process import computing_threads
from dsaccum.engine.schema import installed_schema
from dsaccum.training.opening import installed_versions
from dsaccum.verification.cases.case import Case
from dsaccum.verification.cases.inputs import likely_ranks
from dsaccum.verification.progress import Progress
from dsaccum.verification.ranks.pools import RankPools
from dsaccum.verification.records.hardware import hardware

PLAIN_WAYS: Final = ("own-loss", "outside-loss")
"""DeepSpeed's documented way: backward and step at every micro-step."""


def run_audit(
    progress: Progress,
    *,
    deepspeed: Path | None = None,
    ranks: int | None = None,
    full: bool = False,
    cells: Sequence[Cell] | None = None,
    command: tuple[str, ...] = (),
    pools: RankPools | None = None,
) -> AuditRecord:
    """Try the installed DeepSpeed.

    Args:
        progress: told of each cell.
        deepspeed: the user's own JSON.
        ranks: W; None for as many as there are cores, at most 2.
        full: every combination; otherwise those that are suspected, and every pair of circumstances.
        cells: these instead.
        command: the command line, for the record.
        pools: started ranks to use; None for ranks that start and end here.

    Raises:
        ConfigError: the JSON is wrong, or so many ranks cannot run here.
        RankFailed: the ranks could not start.
    """
    started = time.perf_counter()
    world_size = _checked_ranks(ranks)
    config = read_json_object(deepspeed) if deepspeed is not None else {}
    own_pools = pools or RankPools(threads_per_rank=1)
    try:
        own_pools.get(world_size).run(join)
        with computing_threads(1), tempfile.TemporaryDirectory(prefix="dsaccum-audit-") as folder:
            bench = _Bench(Path(folder), world_size, own_pools, progress)
            own = bench.own(deepspeed, config) if deepspeed is not None else None
            chosen = list(cells) if cells is not None else (every_cell if full else pairwise_cells)(bench.abilities)
            tried = bench.run(chosen)
    finally:
        if pools is None:
            own_pools.close()
    return AuditRecord(
        cover="full" if full else "pairwise",
        ranks=world_size,
        ways={way.id: way.summary for way in WAYS.values()},
        cells=tried,
        untested=_untested(bench.abilities),
        own=own,
        versions=installed_versions(),
        hardware=hardware(),
        command=list(command),
        elapsed_s=time.perf_counter() - started,
    )


class _Bench:
    """Where cells are tried."""

    def __init__(self, folder: Path, ranks: int, pools: RankPools, progress: Progress) -> None:
        self._folder, self._ranks, self._pools, self._progress = folder, ranks, pools, progress
        self._schema: DeepSpeedSchema = installed_schema()
        machine = self._schema.machine
        self.abilities = Abilities(
            fp16=machine.supports_fp16,
            fused_adam=machine.device == "cuda",
            autocast="torch_autocast" in self._schema.top_level.defaults,
        )

    def run(self, cells: Sequence[Cell]) -> list[CellRecord]:
        """Each cell in turn."""
        self._progress.stage(f"trying {len(cells)} cells")
        tried = []
        for number, cell in enumerate(cells, start=1):
            self._progress.detail(f"{number} of {len(cells)}: {cell.way}, ZeRO {cell.circumstances.zero_stage}")
            tried.append(self._try(cell))
        return tried

    def own(self, file: Path, config: Mapping[str, Any]) -> OwnRecord:
        """The user's config in every way; what can be wrong with it is wrong at the first."""
        self._progress.stage(f"trying {file.name}")
        found: list[CellRecord] = []
        for way in WAYS.values():
            self._progress.detail(way.id)
            with located_in(file):
                prepared = prepare_own(config, way, self._folder, self._ranks)
            circumstances = _circumstances_of(prepared.case)
            if not found:
                substitutions = prepared.unavailable
            if circumstances.accumulation_steps < way.least_steps:
                continue
            if missing := self._missing(way):
                found.append(refused(way.id, circumstances, missing))
            else:
                found.append(try_cell(way.id, circumstances, prepared, self._pools.get(self._ranks)))
        return OwnRecord(
            file=str(file),
            circumstances=found[0].circumstances,
            substitutions=substitutions,
            cells=found,
            good=_is_good(found),
        )

    def _try(self, cell: Cell) -> CellRecord:
        circumstances = recorded(cell.circumstances)
        if missing := self._missing(WAYS[cell.way]):
            return refused(cell.way, circumstances, missing)
        prepared = prepare_cell(cell, self._folder, self._ranks)
        return try_cell(cell.way, circumstances, prepared, self._pools.get(self._ranks))

    def _missing(self, way: Way) -> str:
        """DeepSpeed would take a key that it does not know, and do nothing."""
        missing = sorted(way.config.keys() - self._schema.top_level.defaults.keys())
        return f"this DeepSpeed has no {missing[0]}" if missing else ""


def _checked_ranks(ranks: int | None) -> int:
    if ranks is not None and ranks < 1:
        raise ConfigError("is no number of ranks", key="--ranks", value=ranks, allowed="1 or more")
    return ranks or likely_ranks()


def _circumstances_of(case: Case) -> CircumstancesRecord:
    precision = "autocast" if case.precision == "autocast bf16" else case.precision
    return CircumstancesRecord(
        zero_stage=case.zero_stage,
        precision=precision,
        optimizer=str(case.config["optimizer"]["type"]),
        accumulation_steps=case.batch.accumulation_steps,
        clipping="absent" if CLIPPING_KEY not in case.config else "on" if case.gradient_clipping else "off",
    )


def _is_good(cells: Sequence[CellRecord]) -> bool | None:
    """Whether the plain ways are right; None where one of them could not be told and none is wrong."""
    outcomes: set[Any] = {cell.outcome for cell in cells if cell.way in PLAIN_WAYS}
    if outcomes & {"wrong", "refused"}:
        return False
    return None if "untested" in outcomes else True


def _untested(abilities: Abilities) -> list[UntestedRecord]:
    """What cannot be run here, in one circumstance each."""
    steps = max(ACCUMULATION_STEPS)
    candidates: dict[str, Circumstances] = {
        **{precision: Circumstances(1, precision, "AdamW", steps) for precision in PRECISIONS},
        **{optimizer: Circumstances(1, "fp32", optimizer, steps) for optimizer in OPTIMIZERS},
    }
    reasons = {name: why_untested(each, abilities) for name, each in candidates.items()}
    return [UntestedRecord(circumstance=name, reason=reason) for name, reason in reasons.items() if reason]
