"""One watched window: what a rank saw of it, and what is known of the run that it is a part of."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from dsaccum.verification.subject.capture import OptimizerStep
from dsaccum.watch.fsdp import whole
from dsaccum.watch.measuring import Measured
from dsaccum.watch.rows_fed import RowPrints
from dsaccum.watch.tokens import TokenReading

Vectors = dict[str, Tensor]


@dataclass(frozen=True)
class RunFacts:
    """What is known of the run beside the window.

    Attributes:
        kind: ``DeepSpeed``, ``DDP`` or ``bare``.
        framework: ``Trainer``, ``Accelerate`` or empty: who drives it.
        model: class name.
        parameters: elements of all.
        trained: elements of those that are trained.
        zero_stage: None where there is no DeepSpeed.
        precision: of the forward: ``fp32``, ``bf16``, ``fp16``, ``autocast bf16``.
        accumulation_dtype: of the gradient that the optimizer was about to get.
        communication_dtype: what ranks exchange.
        accumulation_steps: what the config says; None where nobody says.
        micro_batch: rows that the config says; likewise.
        clipping: limit that the config says; 0 for none.
        window: which optimizer step this is, from 1.
        engine: which engine, from 1, where there are several.
        earlier_windows: micro-steps of each window before.
        updates_before: updates that the optimizer had made before.
    """

    kind: str
    framework: str
    model: str
    parameters: int
    trained: int
    zero_stage: int | None
    precision: str
    accumulation_dtype: str
    communication_dtype: str
    accumulation_steps: int | None
    micro_batch: int | None
    clipping: float
    window: int
    engine: int = 1
    earlier_windows: tuple[int, ...] = ()
    updates_before: int = 0


@dataclass(frozen=True)
class Clip:
    """A call of ``clip_grad_norm_``: after how many micro-steps of the window, the norm found, and the limit."""

    after: int
    norm: Any
    limit: float

    def with_whole_norm(self) -> Clip:
        """All ranks call this together."""
        return replace(self, norm=float(whole(self.norm)))

    @property
    def acted(self) -> bool:
        """It changed the gradient."""
        return self.norm > self.limit


@dataclass
class RankWindow:
    """What one rank saw, small enough to be sent.

    Attributes:
        rank: its place in the group.
        columns: each micro-step's own gradient, recomputed in the run's precision, sketched.
        truths: the same in float64.
        truth: what they were computed in.
        tokens: read off the logits; None where there are none.
        beside: the share of each micro-step's gradient that comes from other terms of the loss than its tokens.
        own_statistics: a part that normalises each micro-batch by itself; None where there is none.
        seeds: the gradient that arrived at the loss that the model returned; None where it returned none.
        engine: what the engine multiplied by between the script's loss and the module's outputs.
        gradient: what the optimizer was about to get, sketched.
        inputs: a checksum of each tensor that a micro-step's forwards were given.
        row_prints: of each micro-step's rows.
        rows: of each micro-step.
        shapes: of the tensors that each micro-step's forwards were given.
        input_bytes: of all these.
        measured: what each micro-step communicated, and what stayed alive.
        expected_gradient_bytes: that each is due to reduce; None where there is no formula.
        calls: after how many calls of the engine's step each backward pass came.
        clips: made by the script.
        past_engine: micro-steps after which somebody stepped past the engine.
        step_calls: of ``engine.step``; None where there is no engine.
        checksums: of the parameters after the step.
        step: with snapshots on the first rank.
        coefficients: what the script's clipping at the end was due to multiply each tensor by; None with an engine.
        after_clipping: what the script multiplied the gradient by after that.
        stale_clipped: parameters of no optimizer whose gradient was left over, and was in the norm that was clipped.
        scaled: a ``GradScaler`` called the optimizer.
        changed: the first micro-step that ran with other parameters than the first one, and one of them.
        rates: of each parameter group, as each micro-step's first forward found them.
        left_over: parameters that held a gradient when the window's first backward began.
        not_looked_at: elements that optimizers step which are not watched.
    """

    rank: int
    columns: list[Vectors] = field(default_factory=list)
    truths: list[Vectors] = field(default_factory=list)
    truth: str = "float64"
    tokens: list[TokenReading | None] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    own_statistics: str | None = None
    seeds: list[float | None] = field(default_factory=list)
    engine: list[float] = field(default_factory=list)
    gradient: Vectors = field(default_factory=dict)
    inputs: list[tuple[int, ...]] = field(default_factory=list)
    row_prints: list[RowPrints] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    shapes: list[tuple[tuple[int, ...], ...]] = field(default_factory=list)
    input_bytes: list[int] = field(default_factory=list)
    measured: Measured = field(default_factory=Measured)
    expected_gradient_bytes: list[int] | None = None
    calls: list[int] = field(default_factory=list)
    clips: list[Clip] = field(default_factory=list)
    past_engine: list[int] = field(default_factory=list)
    step_calls: int | None = None
    checksums: dict[str, int] = field(default_factory=dict)
    step: OptimizerStep | None = None
    coefficients: dict[str, float] | None = None
    after_clipping: float = 1.0
    stale_clipped: list[str] = field(default_factory=list)
    scaled: bool = False
    changed: tuple[int, str] | None = None
    rates: list[tuple[float, ...]] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    not_looked_at: int = 0
    failure: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def micro_batches(self) -> int:
        """Backward passes, those taken as one that had the same inputs before one call of the engine's step."""
        return len(set(zip(self.calls, self.inputs, strict=True)))


@dataclass(frozen=True)
class WatchedWindow:
    """All ranks together, on the rank that judges."""

    facts: RunFacts
    ranks: list[RankWindow]
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def micro_steps(self) -> int:
        """As run: the most that any rank made."""
        return max((len(rank.columns) for rank in self.ranks), default=0)
