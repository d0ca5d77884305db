"""One case to verify: everything that a rank needs to run it. It is pickled to the ranks, so it holds plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from dsaccum.batch import MICRO_BATCH_KEY, STEPS_KEY, TOTAL_KEY, EffectiveBatch
from dsaccum.config.experiment import Experiment
from dsaccum.config.precision import Precision
from dsaccum.data.samples import Samples
from dsaccum.training.checkpoints.manifest import Counters
from dsaccum.training.checkpoints.shelf import Checkpoint


@dataclass(frozen=True)
class WindowChoice:
    """Which window of the run a step trains on.

    Attributes:
        index: of the window, from 0.
        probe: its tokens are replaced by random ones; lengths, prompts and padding stay. Gradients of random tokens are
            far less alike than those of text, so that weights can be told sharply.
    """

    index: int
    probe: bool


@dataclass(frozen=True)
class Vocabulary:
    """What a model and a batch need to know of the tokenizer."""

    size: int
    end_token: int
    pad_token: int


@dataclass(frozen=True)
class OrderRule:
    """From which ``WindowOrder`` is made on each rank: samples of one epoch, last window, seed."""

    num_samples: int
    last_window: Literal["continue", "drop", "short"]
    seed: int


@dataclass(frozen=True)
class ResumePoint:
    """Where a case goes on, rather than begin.

    Attributes:
        directory: of the run.
        checkpoint: a copy of the run's own.
        effective_batches: of each window that the run has made, as its metrics have them.
        updates: how many of those were applied, by the same account.
        nearby: windows beside those of the case whose samples it holds, to tell where stray rows come from.
    """

    directory: str
    checkpoint: Checkpoint
    effective_batches: tuple[int, ...]
    updates: int
    nearby: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """What is verified.

    Attributes:
        experiment: model, data, loss and run, shrunk where the case is.
        source: the experiment's file, for messages.
        config: the DeepSpeed JSON as ``deepspeed.initialize`` gets it: no ``"auto"``, all three batch keys.
        batch: W, N and B.
        zero_stage: 0 to 3.
        precision: of forward and backward.
        accumulation_dtype: what gradients are accumulated in: fp32, bf16 or fp16.
        gradient_clipping: the limit of the gradient's norm, 0 for none.
        vocabulary: of the tokenizer.
        order: the rule by which windows are filled.
        samples: the text as it is. Samples that no window of the case holds are empty.
        probe_samples: the same with random tokens.
        windows: which window each step trains on.
        loop: ``dsaccum``, ``hf-labels``, ``outside-loss``, or ``FILE.py:function``.
        fault: identifier of an injected fault; None for none.
        planted: False for only what the fault asks of both sides, without the mistake itself.
        remedies: whether our remedies for DeepSpeed's faults are applied.
        resumed: where it goes on; None where it begins.
    """

    experiment: Experiment
    source: str
    config: dict[str, Any]
    batch: EffectiveBatch
    zero_stage: int
    precision: Precision
    accumulation_dtype: str
    gradient_clipping: float
    vocabulary: Vocabulary
    order: OrderRule
    samples: Samples
    probe_samples: Samples
    windows: tuple[WindowChoice, ...]
    loop: str = "dsaccum"
    fault: str | None = None
    planted: bool = True
    remedies: bool = True
    resumed: ResumePoint | None = None

    @property
    def counters(self) -> Counters:
        """Where the run under test stands before the first window, as its checkpoint says."""
        return self.resumed.checkpoint.manifest.counters if self.resumed is not None else Counters()

    @property
    def updates_before(self) -> int:
        """Updates that were applied before the first window."""
        return self.resumed.updates if self.resumed is not None else 0

    @property
    def communication_dtype(self) -> str:
        """What ranks exchange gradients in: the JSON's ``communication_data_type``, else the forward's own type."""
        return self.config.get("communication_data_type") or self.precision.removeprefix("autocast ")

    def with_windows(self, windows: tuple[WindowChoice, ...]) -> Case:
        """The same case on other windows of it."""
        return replace(self, windows=windows)

    def split(self, accumulation_steps: int, micro_batch: int) -> Case:
        """The same case with another N and B, in the config too; E follows."""
        batch = EffectiveBatch(self.batch.world_size, accumulation_steps, micro_batch)
        keys = {TOTAL_KEY: batch.total, STEPS_KEY: accumulation_steps, MICRO_BATCH_KEY: micro_batch}
        return replace(self, batch=batch, config={**self.config, **keys})
