"""An optimizer of torch that steps by itself, its module under DDP or alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsaccum.instruments.gradients import ObservedStep
from dsaccum.watch.desk import Desk, framework
from dsaccum.watch.module_copy import Skeleton
from dsaccum.watch.operations import aside
from dsaccum.watch.subjects.plain import PlainAdapter
from dsaccum.watch.watching import DTYPE_NAMES, Watching
from dsaccum.watch.window import RunFacts


def unwrapped(root: nn.Module) -> tuple[nn.Module, Any, str]:
    """The user's own module, the ranks that share its gradient, and what kind of run it is."""
    if isinstance(root, nn.parallel.DistributedDataParallel):
        return root.module, root.process_group, "DDP"
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return root, None, "bare, several ranks"
    return root, None, "bare"


class BareWatching(Watching):
    """One optimizer.

    Args:
        desk: where findings go.
        module: the user's own.
        skeleton: of it.
        group: ranks that share its gradient.
        optimizer: that steps it.
        kind: of run.
        root: the module as it is called, e.g. DDP.
    """

    def __init__(
        self,
        desk: Desk,
        module: nn.Module,
        skeleton: Skeleton,
        group: Any,
        optimizer: torch.optim.Optimizer,
        kind: str,
        root: nn.Module,
    ) -> None:
        super().__init__(desk, module, skeleton, group)
        self.kind, self.framework = kind, framework()
        self._adapter = PlainAdapter(module, optimizer)
        self._optimizer, self._root = optimizer, root
        self._observed: ObservedStep | None = None
        self._sentinel: Any = None
        self._passes = 0
        self._unclipped: dict[str, Tensor | None] | None = None

    def first_step_made(self) -> None:
        """The optimizer's first step led to this watch being made."""
        if 1 in self.desk.windows:
            self.desk.say("without DeepSpeed the first window is used to find the model; watching from window 2 on")
        smallest = min((p for p in self._adapter.stepped.values() if p.requires_grad), key=lambda p: p.numel())
        self._sentinel = smallest.register_post_accumulate_grad_hook(self._count)
        self.stepped()

    def left(self) -> None:
        """Nothing stays on the run."""
        self._sentinel.remove()

    def _count(self, _: Any) -> None:
        """One backward pass reached this parameter."""
        self._passes += 1

    def before_clip(self, tensors: list[Tensor]) -> None:
        """Keep the gradient from before the script's clipping: the last call's is the one that counts."""
        own = {id(p) for p in self._adapter.parameters.values()}
        if any(id(tensor) in own for tensor in tensors):
            with aside():
                self._unclipped = self._adapter.gradients()
            self._unclipped_at = self.micro_steps

    def began(self) -> None:
        """A new window."""
        self._unclipped, self._unclipped_at = None, -1
        self._reduced: list[bool] = []
        recorder = self.recorder
        if recorder is not None and isinstance(self._root, nn.parallel.DistributedDataParallel):
            recorder.clock = self._clock

    def _clock(self) -> int:
        """Called at each micro-step: whether DDP is to reduce in it."""
        self._reduced.append(bool(getattr(self._root, "require_backward_grad_sync", True)))
        return len(self._reduced) - 1

    def expected_gradient_bytes(self, used: Sequence[Sequence[str]]) -> list[int] | None:
        """Under DDP every trained parameter, used or not, wherever it does not wait."""
        if self.kind != "DDP":
            return None
        whole = sum(p.numel() * p.element_size() for p in self.module.parameters() if p.requires_grad)
        return [whole if reduces else 0 for reduces in self._reduced[: len(used)]]

    def before_step(self) -> None:
        """``optimizer.step`` is about to run."""
        if not self.all_record():
            return
        try:
            with aside():
                self._read()
        except Exception as error:
            self.fail(error)

    def _read(self) -> None:
        """What the optimizer is about to get."""
        at_the_end = self._unclipped is not None and self._unclipped_at == self.micro_steps
        gradients = self._unclipped if at_the_end and self._unclipped is not None else self._adapter.gradients()
        self._observed = ObservedStep(gradients, 1.0, self._adapter.snapshot(), optimizer=self._optimizer)
        self._values = {name: value.clone() for name, value in self._adapter.values().items()}

    def after_step(self) -> None:
        """It has run."""
        observed, self._observed = self._observed, None
        passes, self._passes = self._passes, 0
        if observed is not None and self.recording:
            try:
                with aside():
                    observed.after = self._adapter.snapshot()
                    checksums = self._adapter.checksums()
                extra: dict[str, Any] = {"engine": [1.0] * self.micro_steps, "checksums": checksums}
                self.finish(observed, self._facts(observed), self._values, extra)
            except Exception as error:
                self.fail(error)
        elif passes:
            self.earlier.append(passes)
        self.stepped()

    def _facts(self, observed: ObservedStep) -> RunFacts:
        assert observed.before is not None
        assert self.recorder is not None
        first = self.recorder.micro_steps[0][0] if self.recorder.micro_steps else None
        trained = observed.before.masters
        own = next(iter(trained.values())).dtype if trained else torch.float32
        precision = DTYPE_NAMES.get(own, "fp32")
        if first is not None and first.autocast.enabled:
            precision = f"autocast {DTYPE_NAMES.get(first.autocast.dtype, 'bf16')}"
        limits = [clip.limit for clip in self.clips if clip.after == self.micro_steps]
        return RunFacts(
            kind=self.kind,
            framework=self.framework,
            model=type(self.module).__name__,
            parameters=sum(value.numel() for value in observed.before.parameters.values()),
            trained=sum(value.numel() for value in trained.values()),
            zero_stage=None,
            precision=precision,
            accumulation_dtype=DTYPE_NAMES.get(own, "fp32"),
            communication_dtype=DTYPE_NAMES.get(own, "fp32"),
            accumulation_steps=None,
            micro_batch=None,
            clipping=limits[-1] if limits else 0.0,
            window=self.steps + 1,
            engine=self.number,
            earlier_windows=tuple(self.earlier),
            updates_before=_count(observed, self.steps),
        )


def _count(observed: ObservedStep, steps: int) -> int:
    """Updates before, as the optimizer itself counts; where it doesn't, those that were seen."""
    assert observed.before is not None
    counts = [int(state["step"]) for state in observed.before.states.values() if "step" in state]
    return max(counts, default=steps)
