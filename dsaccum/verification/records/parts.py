"""The parts of the verify record that hold figures: of each step, of the collectives, of the memory."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field

from dsaccum.records import Number, RecordPart

Matrix = list[list[Number]]
"""N rows (micro-steps) of W numbers (ranks)."""
MOST_TENSORS: Final = 20
"""So many tensors that are off are kept, the first ones; thousands would tell no more."""


class LossRecord(RecordPart):
    """The window's loss: as the loop logged it, as one big batch, and in truth."""

    deepspeed: Number = None
    big_batch: Number = None
    truth: Number = None


class WeightsRecord(RecordPart):
    """The weight with which each micro-batch entered the gradient.

    ``by_rank`` has a matrix for each rank, as that rank's optimizer got it. A weight is null where none can be told,
    such as a micro-batch without targets; ``reason`` says why there is no matrix at all. ``max_error`` is the largest
    |w / due - 1|, and ``tolerance`` what it may be.
    """

    expected: Matrix | None = None
    recovered: Matrix | None = None
    by_rank: list[Matrix | None] | None = None
    max_error: Number = None
    tolerance: Number = None
    condition: Number = None
    reason: str | None = None


class TensorOff(RecordPart):
    """One parameter tensor that is outside its bound."""

    name: str
    ratio: Number = None
    error: Number = None
    bound: Number = None


TensorsOff = Annotated[list[TensorOff], AfterValidator(lambda tensors: tensors[:MOST_TENSORS])]


class GradientRecord(RecordPart):
    """The accumulated and reduced gradient against the truth; ``ratio`` is its length over the right one's."""

    error: Number = None
    bound: Number = None
    ratio: Number = None
    residual: Number = None
    yardstick_error: Number = None
    noise: Number = None
    worst_parameter: str | None = None
    tensors_off: TensorsOff = Field(default_factory=list)


class OptimizerSawRecord(RecordPart):
    """The gradient that reached the optimizer, after clipping and unscaling."""

    error: Number = None
    bound: Number = None
    ratio: Number = None


class UpdateRecord(RecordPart):
    """The change of the parameters against the reference optimizer's, given DeepSpeed's gradient."""

    error: Number = None
    bound: Number = None
    ratio: Number = None
    worst_parameter: str | None = None
    tensors_off: TensorsOff = Field(default_factory=list)


class NormRecord(RecordPart):
    """The gradient's norm; ``clipped`` is what clipping left of it."""

    deepspeed: Number = None
    big_batch: Number = None
    clipped: Number = None


class StepRecord(RecordPart):
    """One window. ``optimizer_steps`` has the micro-steps after which the optimizer stepped: [N] if all is well."""

    step: int
    window: int | None = None
    data: Literal["text", "probe"] | None = None
    applied: bool | None = None
    optimizer_steps: list[int] | None = None
    learning_rate: Number = None
    loss: LossRecord = LossRecord()
    micro_batch_weights: WeightsRecord = WeightsRecord()
    gradient: GradientRecord = GradientRecord()
    optimizer_saw: OptimizerSawRecord = OptimizerSawRecord()
    update: UpdateRecord = UpdateRecord()
    gradient_norm: NormRecord = NormRecord()


class TrajectoryRecord(RecordPart):
    """How far parameters and losses drifted over all steps: a further sight, on which no verdict rests."""

    max: Number = None
    mean_drift: Number = None
    bound: Number = None


class MicroStepRecord(RecordPart):
    """The collectives of one micro-step: how many of each kind, and input bytes on one rank."""

    micro_step: int
    operations: dict[str, int] = Field(default_factory=dict)
    gradient_bytes: int | None = None
    parameter_bytes: int | None = None
    control_bytes: int | None = None


class CommunicationRecord(RecordPart):
    """The collectives of one window without capture."""

    per_micro_step: list[MicroStepRecord] = Field(default_factory=list)
    expected_gradient_bytes: int | None = None
    only_at_boundary: bool | None = None
    witnesses: dict[str, Any] = Field(default_factory=dict)
    reason: str | None = None


class MemoryByCategory(RecordPart):
    """Bytes of one rank at the peak."""

    parameter: int | None = None
    gradient: int | None = None
    activation: int | None = None
    optimizer: int | None = None
    temporary: int | None = None


class MemoryRun(RecordPart):
    """The peak of one way of splitting a batch."""

    accumulation_steps: int
    micro_batch: int
    peak_bytes: int | None = None
    by_category: MemoryByCategory = MemoryByCategory()


class MemoryRecord(RecordPart):
    """Memory of one rank in the config's own split, and in other splits of the same and of twice the batch."""

    peak_bytes: int | None = None
    by_category: MemoryByCategory = MemoryByCategory()
    runs: list[MemoryRun] = Field(default_factory=list)
    reason: str | None = None
