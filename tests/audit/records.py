"""Audits made by hand."""

from __future__ import annotations

from typing import Any

from dsaccum.audit.record import AuditRecord, CellRecord, CircumstancesRecord, OwnRecord


def circumstances(stage: int = 0, **changes: Any) -> CircumstancesRecord:
    plain = {"precision": "fp32", "optimizer": "AdamW", "accumulation_steps": 4, "clipping": "off"}
    return CircumstancesRecord(**{"zero_stage": stage, **plain, **changes})


def cell(
    way: str, outcome: str = "right", stage: int = 0, *causes: str, detail: str = "", **changes: Any
) -> CellRecord:
    return CellRecord(
        way=way, circumstances=circumstances(stage, **changes), outcome=outcome, causes=list(causes), detail=detail
    )


def record(*cells: CellRecord, **changes: Any) -> AuditRecord:
    return AuditRecord(**{"cover": "pairwise", "ranks": 2, "ways": {}, "cells": cells, **changes})


def own(good: bool | None, *cells: CellRecord) -> OwnRecord:
    return OwnRecord(file="ds.json", circumstances=circumstances(1), substitutions=[], cells=list(cells), good=good)
