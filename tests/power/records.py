"""Matrices made by hand."""

from __future__ import annotations

from typing import Any

from dsaccum.power.record import CellRecord, CleanRecord, FaultsRecord, SettingRecord


def setting(stage: int = 0, **changes: Any) -> SettingRecord:
    return SettingRecord(**{"ranks": 2, "accumulation_steps": 3, "zero_stage": stage, "packing": "packed", **changes})


def cell(fault: str, outcome: str = "named", stage: int = 0, **changes: Any) -> CellRecord:
    causes = {"named": [fault], "ambiguous": [fault, "other"], "misnamed": ["other"], "unnamed": ["unknown-difference"]}
    return CellRecord(
        **{"fault": fault, "setting": setting(stage), "outcome": outcome, "causes": causes.get(outcome, []), **changes}
    )


def record(*cells: CellRecord, **changes: Any) -> FaultsRecord:
    clean = [CleanRecord(setting=setting(), verdict="equivalent", usual_check="missed")]
    return FaultsRecord(**{"cover": "pairwise", "cells": cells, "clean": clean, "not_applicable": [], **changes})
