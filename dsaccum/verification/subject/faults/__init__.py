"""Every known mistake, to be put in on purpose: a check that has never failed proves nothing."""

from __future__ import annotations

from dsaccum.config.errors import ConfigError, nearest
from dsaccum.verification.subject.faults.boundaries import BOUNDARY_FAULTS
from dsaccum.verification.subject.faults.clipping import CLIPPING_FAULTS
from dsaccum.verification.subject.faults.data import DATA_FAULTS
from dsaccum.verification.subject.faults.fault import Fault
from dsaccum.verification.subject.faults.model import MODEL_FAULTS
from dsaccum.verification.subject.faults.optimizer import OPTIMIZER_FAULTS
from dsaccum.verification.subject.faults.ranks import RANK_FAULTS
from dsaccum.verification.subject.faults.target_counts import COUNT_FAULTS
from dsaccum.verification.subject.faults.weights import WEIGHT_FAULTS

__all__ = ["FAULTS", "Fault", "fault_of"]

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
    )
}
"""By identifier."""

_NO_FAULT = Fault(id="none", summary="nothing is done wrong")


def fault_of(identifier: str | None) -> Fault:
    """The fault of that name; one that does nothing for None.

    Raises:
        ConfigError: there is none of that name.
    """
    if identifier is None:
        return _NO_FAULT
    if identifier not in FAULTS:
        guess = nearest(identifier, FAULTS)
        raise ConfigError(
            "there is no such fault",
            source="command line",
            key="--inject",
            value=identifier,
            allowed=None if guess else ", ".join(FAULTS),
            fix=f"--inject {guess}" if guess else None,
        )
    return FAULTS[identifier]
