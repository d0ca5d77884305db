"""What makes two runs the same experiment: all that decides a trajectory, and nothing that only splits it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from dsaccum.batch import MICRO_BATCH_KEY, STEPS_KEY, TOTAL_KEY
from dsaccum.config.keys import OBSERVERS

_FREE_IN_JSON: Final = {TOTAL_KEY, STEPS_KEY, MICRO_BATCH_KEY, "checkpoint", *OBSERVERS}
"""How E is split, and what only watches or writes."""
_FREE_IN_DATA: Final = {"files", "dataset", "subset", "split", "source", "column"}
"""Where it was read from: its content is compared."""


def everything(record: Mapping[str, Any]) -> dict[str, Any]:
    """All that ranks of one run must have in common, by dotted name."""
    named = dict(_deciding(record))
    for section in ("effective_batch", "versions", "parameters"):
        named |= dict(_leaves(section, record.get(section)))
    named |= dict(_leaves("run", _section(_section(record, "experiment"), "run")))
    return named


def differences(record: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Fields in which two runs' records differ though they would have to be equal: (dotted name, one's, other's).

    The effective batch is not among them: who continues a run may change it, when asked to.

    Args:
        record: ``run.json`` of one.
        other: of the other.
    """
    ours, theirs = dict(_deciding(record)), dict(_deciding(other))
    names = [*ours, *(name for name in theirs if name not in ours)]
    return [(name, ours.get(name), theirs.get(name)) for name in names if ours.get(name) != theirs.get(name)]


def _deciding(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    experiment, config = _section(record, "experiment"), _section(record, "deepspeed")
    for name in ("model", "loss"):
        yield from _leaves(name, _section(experiment, name))
    data = {key: value for key, value in _section(experiment, "data").items() if key not in _FREE_IN_DATA}
    yield from _leaves("data", data)
    yield "data's content (sha256)", _section(record, "data").get("sha256")
    yield "run.seed", _section(experiment, "run").get("seed")
    zero = _section(config, "zero_optimization")
    yield "zero_optimization.stage", zero.get("stage", 0)
    rest = {key: value for key, value in config.items() if key not in _FREE_IN_JSON | {"zero_optimization"}}
    yield from _leaves("", rest)


def _section(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = record.get(name)
    return found if isinstance(found, Mapping) else {}


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping) or not value:
        yield name, value
        return
    for key, inner in value.items():
        yield from _leaves(f"{name}.{key}" if name else str(key), inner)
