"""Whether a run may start: an earlier verdict on the same config, model and code, or one that is reached now."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dsaccum.config.errors import ConfigError
from dsaccum.engine.process import Ranks
from dsaccum.preflight import kept
from dsaccum.preflight.fingerprint import fingerprint
from dsaccum.preflight.own_ranks import OwnRanks
from dsaccum.preflight.undisturbed import undisturbed
from dsaccum.training.failure import is_communication
from dsaccum.training.inputs import Inputs
from dsaccum.training.opening import installed_versions
from dsaccum.training.outcome import RunFailed, say
from dsaccum.training.preflight import NotEquivalent
from dsaccum.training.watchdog import Watchdog
from dsaccum.verification.cases.substitutions import drop_observers


@dataclass(frozen=True)
class Outcome:
    """What rank 0 found out, for all ranks.

    Attributes:
        record: for ``run.json``.
        line: for people.
        wrong: the whole finding where the run must not start.
    """

    record: dict[str, Any]
    line: str
    wrong: str | None = None


def carry_out(inputs: Inputs, ranks: Ranks, watchdog: Watchdog, note: Callable[[str], None]) -> dict[str, Any]:
    """See ``dsaccum.training.preflight.Preflight``."""
    own = OwnRanks(ranks, lambda come: watchdog.at(0, come, "setup"))
    try:
        outcome = _on_first_rank(inputs, own, note) if ranks.is_first else own.follow()
    except ConfigError:
        raise
    except Exception as error:
        if is_communication(error):
            raise
        say("".join(traceback.format_exception(error)).rstrip())
        problem = f"rank {ranks.rank} failed in the preflight: {type(error).__name__}: {' '.join(str(error).split())}"
        raise RunFailed(f"{problem}; --preflight off starts without it", own=True) from error
    note(f"preflight       {outcome.line}")
    if outcome.wrong is not None:
        raise NotEquivalent(outcome.wrong)
    record: dict[str, Any] = outcome.record
    return record


def _on_first_rank(inputs: Inputs, own: OwnRanks, note: Callable[[str], None]) -> Outcome:
    key = fingerprint(_circumstances(inputs))
    earlier = kept.find(key)
    if earlier is not None:
        outcome = Outcome(
            {"verdict": "equivalent", "verified_on": str(earlier.on), "fingerprint": key},
            f"equivalent, as verified on {earlier.on} for this config, model and code",
        )
    else:
        note("preflight       verifying a small copy of this run, once for this config, model and code ...")
        from dsaccum.preflight.small_run import verify_now  # the verification comes with it

        with undisturbed():
            outcome = verify_now(inputs, own, key)
    own.dismiss(outcome)
    return outcome


def _circumstances(inputs: Inputs) -> dict[str, Any]:
    """All that decides a verdict besides code."""
    experiment = inputs.experiment
    return {
        "config": drop_observers(inputs.deepspeed.config),
        "experiment": experiment.model_dump(mode="json", include={"model", "data", "loss"}),
        "versions": installed_versions(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
