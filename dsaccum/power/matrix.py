"""The detection matrix: every fault in every chosen setting is run, verified, and compared with what it is called."""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

from dsaccum.config.errors import ConfigError
from dsaccum.config.experiment import Experiment
from dsaccum.engine.process import computing_threads
from dsaccum.power.record import (
    CellRecord,
    CleanRecord,
    FaultsRecord,
    NotApplicableRecord,
    Outcome,
    SettingRecord,
    UsualCheck,
)
from dsaccum.power.settings import SETTINGS, Cell, Setting, every_cell, pairwise_cells
from dsaccum.power.small_case import write_case
from dsaccum.power.usual_check import final_parameters, parameters_agree
from dsaccum.training.opening import installed_versions
from dsaccum.verification.cases.case import Case
from dsaccum.verification.cases.inputs import PreparedCase, read_case
from dsaccum.verification.diagnosis.causes import UNKNOWN
from dsaccum.verification.progress import Progress, SilentProgress
from dsaccum.verification.ranks.failed import RankFailed
from dsaccum.verification.ranks.pools import RankPools
from dsaccum.verification.records.hardware import hardware
from dsaccum.verification.records.record import Cause, verdict_of
from dsaccum.verification.subject.faults import FAULTS, fault_of
from dsaccum.verification.verify import Examined, Extent, examine, run_windows, with_fault

EXTENT = Extent(memory="undecided", trajectory=False)
"""Memory is measured where nothing else is wrong: for what is clean, and for what only memory can show."""
Parameters = dict[str, torch.Tensor]


def run_matrix(
    progress: Progress,
    *,
    full: bool = False,
    faults: tuple[str, ...] = tuple(FAULTS),
    command: tuple[str, ...] = (),
    pools: RankPools | None = None,
) -> FaultsRecord:
    """Try every fault.

    Args:
        progress: told of each setting and fault.
        full: in every setting that can show it; otherwise so that every pair of circumstances comes up.
        faults: these alone.
        command: the command line, for the record.
        pools: started ranks to use; None for ranks that start and end here.

    Raises:
        RankFailed: ranks could not start, or a run without a fault failed.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="dsaccum-faults-") as folder:
        progress.stage("preparing the settings")
        bench = _Bench(Path(folder), progress)
        applicable, refused = bench.applicability(faults)
        cells = every_cell(applicable) if full else pairwise_cells(applicable)
        own = pools or RankPools(threads_per_rank=1)
        try:
            with computing_threads(1):
                clean, tried = bench.run(cells, own)
        finally:
            if pools is None:
                own.close()
    return FaultsRecord(
        cover="full" if full else "pairwise",
        cells=tried,
        clean=clean,
        not_applicable=refused,
        versions=installed_versions(),
        hardware=hardware(),
        command=list(command),
        elapsed_s=time.perf_counter() - started,
    )


class _Bench:
    """Prepared cases, one for each setting, and what is run with them."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self._progress = progress
        self._prepared: dict[Setting, PreparedCase] = {}
        for number, setting in enumerate(SETTINGS):
            progress.detail(f"{number + 1} of {len(SETTINGS)}")
            own = folder / str(number)
            own.mkdir()
            self._prepared[setting] = read_case(write_case(own, setting))

    def applicability(self, faults: tuple[str, ...]) -> tuple[dict[str, list[Setting]], list[NotApplicableRecord]]:
        """Where each fault can show itself; where not, and why."""
        applicable: dict[str, list[Setting]] = {}
        refused: dict[tuple[str, str], list[Setting]] = {}
        for fault in faults:
            for setting, prepared in self._prepared.items():
                unfit = FAULTS[fault].inapplicable(prepared.case, prepared.model)
                if unfit is None:
                    applicable.setdefault(fault, []).append(setting)
                else:
                    refused.setdefault((fault, unfit.reason), []).append(setting)
        return applicable, [
            NotApplicableRecord(fault=fault, reason=reason, settings=[_setting(each) for each in settings])
            for (fault, reason), settings in refused.items()
        ]

    def run(self, cells: list[Cell], pools: RankPools) -> tuple[list[CleanRecord], list[CellRecord]]:
        """Setting by setting: without a fault first, then every fault that is tried there."""
        clean, tried = [], []
        settings = sorted({cell.setting for cell in cells}, key=SETTINGS.index)
        for number, setting in enumerate(settings, start=1):
            here = [cell.fault for cell in cells if cell.setting == setting]
            self._progress.stage(f"setting {number} of {len(settings)}: {_in_words(setting)}, {len(here)} faults")
            trial = _Trial(setting, self._prepared[setting], pools)
            clean.append(trial.without_fault())
            for fault in here:
                self._progress.detail(fault)
                tried.append(trial.with_fault(fault))
        return clean, tried


class _Trial:
    """One setting: its big batch is run once, for the usual check."""

    def __init__(self, setting: Setting, prepared: PreparedCase, pools: RankPools) -> None:
        self._setting, self._prepared, self._pools = setting, prepared, pools
        self._big_batches: list[tuple[tuple[Experiment, str | None], Parameters]] = []

    def without_fault(self) -> CleanRecord:
        found = self._examine(with_fault(self._prepared, None))
        return CleanRecord(
            setting=_setting(self._setting),
            verdict=verdict_of(found.claims),
            causes=[cause.id for cause in found.causes],
            usual_check=self._usual_check(self._prepared.case, found),
        )

    def with_fault(self, fault: str) -> CellRecord:
        started = time.perf_counter()
        prepared = with_fault(self._prepared, fault)
        try:
            found = self._examine(prepared)
        except (RankFailed, ConfigError) as error:
            return CellRecord(
                fault=fault, setting=_setting(self._setting), outcome="stopped", detail=str(error),
                usual_check="caught", elapsed_s=time.perf_counter() - started,
            )  # fmt: skip
        return CellRecord(
            fault=fault,
            setting=_setting(self._setting),
            outcome=_outcome(fault, found.causes) if verdict_of(found.claims) == "not_equivalent" else "missed",
            causes=[cause.id for cause in found.causes],
            certain=all(cause.confidence == "certain" for cause in found.causes),
            detail="; ".join(f"{claim}: {found.reasons.get(claim, '')}" for claim in found.claims.which("fail")),
            usual_check=self._usual_check(prepared.case, found),
            elapsed_s=time.perf_counter() - started,
        )

    def _examine(self, prepared: PreparedCase) -> Examined:
        return examine(prepared, self._pools.get(self._setting.ranks), SilentProgress(), EXTENT)

    def _usual_check(self, case: Case, found: Examined) -> UsualCheck | None:
        parameters = final_parameters([step.optimizer_step for step in found.evidence.steps])
        if parameters is None:
            return None
        return "missed" if parameters_agree(parameters, self._big_batch(case)) else "caught"

    def _big_batch(self, case: Case) -> Parameters:
        """Parameters after the same windows, each as one micro-batch on each rank, without the mistake."""
        asked = (case.experiment, case.fault if fault_of(case.fault).asks_for_a_model else None)
        known = next((found for other, found in self._big_batches if other == asked), None)
        if known is None:
            big = replace(case, planted=False).split(1, case.batch.accumulation_steps * case.batch.micro_batch)
            _, captures, _ = run_windows(big, self._pools.get(self._setting.ranks), SilentProgress())
            known = dict(final_parameters([window[0].steps[-1] for window in captures]) or {})
            self._big_batches.append((asked, known))
        return known


def _outcome(fault: str, causes: list[Cause]) -> Outcome:
    """How a fault that was caught is called."""
    named = {cause.id for cause in causes}
    if named == {UNKNOWN}:
        return "unnamed"
    if any(cause.confidence == "certain" and cause.id != fault for cause in causes) or fault not in named:
        return "misnamed"
    return "named" if named == {fault} else "ambiguous"


def _setting(setting: Setting) -> SettingRecord:
    return SettingRecord(**asdict(setting))


def _in_words(setting: Setting) -> str:
    return f"W = {setting.ranks}, N = {setting.accumulation_steps}, ZeRO {setting.zero_stage}, {setting.packing} rows"
