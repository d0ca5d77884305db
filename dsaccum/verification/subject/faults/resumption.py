"""What a checkpoint's load may lose: weights, the optimizer's moments, the schedule, the place in the stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from dsaccum.instruments.adapters import adapter_for
from dsaccum.verification.cases.windows import case_stream
from dsaccum.verification.subject.faults.fault import Fault, Unfit, replaced

if TYPE_CHECKING:
    from dsaccum.verification.cases.case import Case
    from dsaccum.verification.subject.loops import Subject, Windows


class WeightsNotRestored(Fault):
    """One parameter is not the checkpoint's."""

    @contextmanager
    def planted(self, subject: Subject, case: Case) -> Iterator[None]:  # noqa: D102
        adapter = adapter_for(subject.engine)
        for place in adapter.places():
            if place.name == adapter.trained[0]:
                place.cut(place.master).mul_(1.01)
        yield


class OptimizerStateNotRestored(Fault):
    """The moments are zero, as after a load of the module alone; the count goes on."""

    @contextmanager
    def planted(self, subject: Subject, case: Case) -> Iterator[None]:  # noqa: D102
        for state in adapter_for(subject.engine).base.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and key != "step":
                    value.zero_()
        yield


class ScheduleNotRestored(Fault):
    """A new schedule is built after the load."""

    @contextmanager
    def planted(self, subject: Subject, case: Case) -> Iterator[None]:  # noqa: D102
        engine = subject.engine
        old = engine.lr_scheduler
        new = type(old)(old.optimizer, **case.config["scheduler"].get("params", {}))
        with replaced(engine, "lr_scheduler", new):
            yield


class StreamPositionNotRestored(Fault):
    """The stream goes on one sample too late, on all ranks alike."""

    def feed(self, windows: Windows, case: Case, rank: int) -> Windows:  # noqa: D102
        if case.resumed is None:  # where memory is measured, nothing is gone on from
            return windows
        checkpoint = case.resumed.checkpoint
        origin = checkpoint.manifest.origin
        late = origin.model_copy(update={"position": origin.position + 1})
        manifest = checkpoint.manifest.model_copy(update={"origin": late})
        resumed = replace(case.resumed, checkpoint=replace(checkpoint, manifest=manifest))
        return case_stream(replace(case, resumed=resumed), rank)


def _a_checkpoint(case: Case) -> Unfit | None:
    return Unfit("no checkpoint is gone on from", "--resume DIR") if case.resumed is None else None


def _a_schedule(case: Case) -> Unfit | None:
    return None if case.config.get("scheduler") else Unfit("the config has no schedule")


def _an_endless_stream(case: Case) -> Unfit | None:
    other = case.order.last_window != "continue"
    return (
        Unfit(f"data.last_window is {case.order.last_window}, and its windows begin with an epoch") if other else None
    )


RESUMPTION_FAULTS: tuple[Fault, ...] = (
    WeightsNotRestored(
        id="weights-not-restored",
        summary="a parameter is not loaded, or is changed between the load and the first step",
        needs=(_a_checkpoint,),
    ),
    OptimizerStateNotRestored(
        id="optimizer-state-not-restored",
        summary="the weights are loaded, the optimizer's moments are not",
        needs=(_a_checkpoint,),
    ),
    ScheduleNotRestored(
        id="schedule-not-restored",
        summary="the schedule is built anew after the load",
        needs=(_a_checkpoint, _a_schedule),
    ),
    StreamPositionNotRestored(
        id="stream-position-not-restored",
        summary="the stream of samples goes on one sample too late",
        needs=(_a_checkpoint, _an_endless_stream),
    ),
)
