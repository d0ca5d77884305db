"""Every known mistake, to be put in on purpose: a check that has never failed proves nothing."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from dsaccum.config.errors import ConfigError, nearest
from dsaccum.config.factories import call_factory
from dsaccum.verification.subject.faults.boundaries import BOUNDARY_FAULTS
from dsaccum.verification.subject.faults.clipping import CLIPPING_FAULTS
from dsaccum.verification.subject.faults.data import DATA_FAULTS
from dsaccum.verification.subject.faults.fault import Fault
from dsaccum.verification.subject.faults.model import MODEL_FAULTS
from dsaccum.verification.subject.faults.optimizer import OPTIMIZER_FAULTS
from dsaccum.verification.subject.faults.precision import PRECISION_FAULTS
from dsaccum.verification.subject.faults.ranks import RANK_FAULTS
from dsaccum.verification.subject.faults.resumption import RESUMPTION_FAULTS
from dsaccum.verification.subject.faults.target_counts import COUNT_FAULTS
from dsaccum.verification.subject.faults.together import Together
from dsaccum.verification.subject.faults.trained import TRAINED_FAULTS
from dsaccum.verification.subject.faults.weights import WEIGHT_FAULTS, Weighed

__all__ = ["FAULTS", "OF_RESUMPTION", "Fault", "Weighed", "fault_of"]

FAULTS: dict[str, Fault] = {
    fault.id: fault
    for fault in (
        *WEIGHT_FAULTS,
        *COUNT_FAULTS,
        *BOUNDARY_FAULTS,
        *RANK_FAULTS,
        *DATA_FAULTS,
        *CLIPPING_FAULTS,
        *OPTIMIZER_FAULTS,
        *MODEL_FAULTS,
        *PRECISION_FAULTS,
        *TRAINED_FAULTS,
    )
}
"""By identifier."""
OF_RESUMPTION: dict[str, Fault] = {fault.id: fault for fault in RESUMPTION_FAULTS}
"""Those that a case shows which goes on from a checkpoint."""

_NO_FAULT = Fault(id="none", summary="nothing is done wrong")


def fault_of(identifier: str | None) -> Fault:
    """The fault of that name; one that does nothing for None.

    Args:
        identifier: of ``FAULTS`` or ``OF_RESUMPTION``; several of them at once, joined by ``+``; or the user's own,
            ``FILE.py:function``, where function() gives a ``Fault``. Its file is executed, here and on every rank.
            ``Weighed`` says what to write for wrong weights.

    Raises:
        ConfigError: there is none of that name, or the user's own cannot be made.
    """
    if identifier is None:
        return _NO_FAULT
    if ":" in identifier:
        return _own_fault(identifier, _last_change(Path(identifier.rpartition(":")[0])))
    if "+" in identifier:
        return Together.of(*map(fault_of, identifier.split("+")))
    known = FAULTS | OF_RESUMPTION
    if identifier not in known:
        guess = nearest(identifier, known)
        raise ConfigError(
            "there is no such fault",
            key="--inject",
            value=identifier,
            allowed=None if guess else f"{', '.join(known)}, or FILE.py:function",
            fix=f"--inject {guess}" if guess else None,
        )
    return known[identifier]


@lru_cache(maxsize=1)  # one object for all parts of a run: what ``feed`` remembers, ``planted`` may need
def _own_fault(identifier: str, last_change: int) -> Fault:
    fault = call_factory(identifier, source=None, key="--inject")
    if not isinstance(fault, Fault):
        raise ConfigError(
            f"the function returned {type(fault).__name__}",
            key="--inject",
            value=identifier,
            allowed="a dsaccum.verification.subject.faults.Fault",
        )
    return fault


def _last_change(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0  # the factory says that there is no such file
