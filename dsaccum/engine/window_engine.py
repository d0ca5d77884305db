"""One window in, one optimizer step out: the loop over micro-steps through DeepSpeed's engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dsaccum.batch import EffectiveBatch, is_update_boundary
from dsaccum.engine.gradients import GradientWitness, gradient_norm, step_discarded
from dsaccum.engine.out_of_memory import WindowRecovery, can_be_void, nothing_finite, split_otherwise, stand_in
from dsaccum.engine.remedies import apply_remedies
from dsaccum.loss import SummedLoss, engine_divisor, model_inputs

MicroBatch = Mapping[str, Tensor]
Progress = Callable[[int, str], None]
"""Told where the window stands: micro-step (from 1) and phase (forward, backward, step)."""


@dataclass(frozen=True)
class WindowOutcome:
    """What one window did.

    Attributes:
        micro_losses: this rank's summed loss of each micro-batch, float64 [N], on the engine's device, undivided.
        learning_rate: the rate used in this step.
        gradient_norm: before clipping, of the whole reduced gradient; None where the step was skipped.
        applied: False where the gradient was not finite and the whole window was discarded, on all ranks alike.
        out_of_memory: what this rank could not get; the window is void then on all ranks, and none of it was applied.
    """

    micro_losses: Tensor
    learning_rate: float
    gradient_norm: float | None
    applied: bool
    out_of_memory: str | None = None


class WindowEngine:
    """DeepSpeed's engine, fed by windows. The engine is the one owner of the division by N.

    Args:
        model: as ``build_model`` made it.
        config: the resolved DeepSpeed JSON, with ``gradient_accumulation_steps`` and the micro-batch size in it.
        batch: the same numbers, with W.
        loss: sum and count of a micro-batch.
        remedies: mend what DeepSpeed gets wrong and we can mend; False shows what it does by itself.
        recover: where memory runs out, see the window to its end and say so, so that it can be run again in a smaller
            split; has no effect at ZeRO 3 and with offloading.
    """

    def __init__(
        self,
        model: nn.Module,
        config: dict[str, Any],
        batch: EffectiveBatch,
        loss: SummedLoss,
        *,
        remedies: bool = True,
        recover: bool = False,
    ) -> None:
        import deepspeed

        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=trained, config=_without_host_syncs(config)
        )
        self.batch, self.loss = batch, loss
        self.remedies = apply_remedies(self.engine) if remedies else []
        self.decayed_without_gradient: list[str] = []
        """Parameters that got no gradient in the first window but are changed by weight decay all the same.

        At every ZeRO stage: DeepSpeed steps them with gradients of zero, where PyTorch would leave them alone.
        """
        self._stage = self.engine.zero_optimization_stage()
        # Where DeepSpeed has no wrapper around the optimizer, nobody computes a norm or looks for NaN: we do.
        self._bare_optimizer = self._stage == 0 and self.engine.optimizer is self.engine.basic_optimizer
        self._witness: GradientWitness | None = GradientWitness(self.engine.module)
        self._recovery = WindowRecovery(self.engine) if recover and can_be_void(self.engine) else None

    @property
    def device(self) -> torch.device:
        """Where micro-batches have to be."""
        return torch.device(self.engine.device)

    def run_window(
        self, micro_batches: Sequence[MicroBatch], window_targets: int, progress: Progress = lambda *_: None
    ) -> WindowOutcome:
        """Accumulate N micro-batches and make the one optimizer step.

        Args:
            micro_batches: this rank's N micro-batches of B rows each.
            window_targets: target tokens of the whole window on all ranks.
            progress: called before each phase.

        Raises:
            ValueError: another number of micro-batches than N, or of rows than B.
        """
        steps = self.batch.accumulation_steps
        self._check_shape(micro_batches)
        divisor = engine_divisor(window_targets, steps, self.batch.world_size)
        learning_rate = float(self.engine.get_lr()[0])
        losses = []
        norm: float | None = None
        skipped_before = self.engine.skipped_steps
        if self._recovery is not None:
            self._recovery.begin_window()
        for micro_step, micro_batch in enumerate(micro_batches, start=1):
            losses.append(self._micro_step(micro_batch, divisor, partial(progress, micro_step)))
            progress(micro_step, "step")
            if is_update_boundary(micro_step, steps):
                norm = self._update()
            else:
                self.engine.step()
        applied = self.engine.skipped_steps == skipped_before
        out_of_memory = self._recovery.message if self._recovery is not None else None
        if out_of_memory is None and self._witness is not None:
            decays = any(group.get("weight_decay") for group in self.engine.optimizer.param_groups)
            self.decayed_without_gradient = self._witness.close() if decays else []
            self._witness = None
        known_norm = norm if applied else None
        return WindowOutcome(torch.stack(losses).double(), learning_rate, known_norm, applied, out_of_memory)

    def run_again_as(self, batch: EffectiveBatch) -> None:
        """Take back a window that some rank had no memory for, and go on with another split of the same E.

        Every rank calls it, before it runs the window again.
        """
        assert self._recovery is not None
        self._recovery.undo()
        split_otherwise(self.engine, batch)
        self.batch = batch

    def _micro_step(self, micro_batch: MicroBatch, divisor: float, progress: Callable[[str], None]) -> Tensor:
        if self._recovery is None:
            return self._accumulate(micro_batch, divisor, progress)
        return self._recovery.micro_step(
            lambda: self._accumulate(micro_batch, divisor, progress),
            lambda: self._accumulate(stand_in(micro_batch), math.nan, progress, void=True),
        )

    def _accumulate(
        self, micro_batch: MicroBatch, divisor: float, progress: Callable[[str], None], *, void: bool = False
    ) -> Tensor:
        """Forward and backward of one micro-batch; returns its summed loss. ``void``: all its gradients are NaN.

        A method of its own, so that logits and graph are gone before the next micro-batch needs their memory.
        """
        progress("forward")
        on_device = {name: tensor.to(self.device, non_blocking=True) for name, tensor in micro_batch.items()}
        outputs = self.engine(**model_inputs(on_device))
        loss_sum = self.loss.sum(outputs, on_device)
        if void:
            loss_sum = loss_sum + nothing_finite(outputs)
        del outputs
        progress("backward")
        # Fed S_rk / d; the engine divides by N and averages over W: d (mean over the window) / d (parameters).
        self.engine.backward(loss_sum / divisor)
        return loss_sum.detach()

    def _update(self) -> float | None:
        """The boundary: reduce has happened in ``backward``; clip, step, advance the schedule. Returns the norm."""
        if not self._bare_optimizer:
            self.engine.step()
            norm = self.engine.get_global_grad_norm()
            return None if norm is None else float(norm)
        # After the all-reduce the gradient is the same on every rank, so every rank decides alike without a word.
        norm = float(gradient_norm(self.engine.module.parameters()))
        if math.isfinite(norm):
            self.engine.step()
        else:
            with step_discarded(self.engine):
                self.engine.step()
        return norm

    @torch.no_grad()
    def evaluate(
        self, micro_batches: Iterable[MicroBatch], progress: Callable[[], None] = lambda: None
    ) -> tuple[Tensor, int]:
        """Summed loss (float64 scalar on the device) and target count of this rank's micro-batches, without dropout.

        Every rank must bring the same number of micro-batches: at ZeRO 3 each forward is a collective.
        """
        self.engine.eval()
        total, count = torch.zeros((), dtype=torch.float64, device=self.device), 0
        for micro_batch in micro_batches:
            progress()
            on_device = {name: tensor.to(self.device) for name, tensor in micro_batch.items()}
            total += self.loss.sum(self.engine(**model_inputs(on_device)), on_device)
            count += self.loss.count(micro_batch)
        self.engine.train()
        return total, count

    def write_events(self, events: list[tuple[str, float, int]]) -> None:
        """Send (name, value, samples so far) to the monitors that the DeepSpeed JSON asks for; rank 0 writes."""
        if self.engine.monitor.enabled:
            self.engine.monitor.write_events(events)

    def full_state_dict(self) -> dict[str, Tensor] | None:
        """The whole model's parameters and buffers on the CPU, on rank 0; None elsewhere. A collective at ZeRO 3.

        Gathered one parameter at a time, so that no rank ever holds the whole model on its device.
        """
        import deepspeed

        module: nn.Module = self.engine.module
        first = self.engine.global_rank == 0
        if self._stage < 3:
            return {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()} if first else None
        state = {}
        for name, parameter in module.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                if first:
                    state[name] = parameter.detach().cpu().clone()
        persistent = set(module.state_dict())
        state.update({name: tensor.cpu() for name, tensor in module.named_buffers() if name in persistent})
        return state if first else None

    def _check_shape(self, micro_batches: Sequence[MicroBatch]) -> None:
        steps, rows = self.batch.accumulation_steps, self.batch.micro_batch
        if len(micro_batches) != steps:
            raise ValueError(f"a window is {steps} micro-batches, got {len(micro_batches)}")
        for index, micro_batch in enumerate(micro_batches):
            for name, tensor in micro_batch.items():
                if tensor.size(0) != rows:
                    raise ValueError(
                        f"micro-batch {index + 1}: {name} has {tensor.size(0)} rows, "
                        f"train_micro_batch_size_per_gpu is {rows}"
                    )


def _without_host_syncs(config: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's throughput timer synchronises the device at every micro-step, for a line nobody asked for."""
    return {"timers": {"throughput": {"enabled": False}}, **config}
