"""Optimizers of torch that step by themselves, their module under DDP or alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsaccum.instruments.gradients import ObservedStep
from dsaccum.instruments.optimizer_saw import SeenGradient
from dsaccum.watch.desk import Desk, framework, scaler_steps
from dsaccum.watch.fsdp import class_name, group_of
from dsaccum.watch.module_copy import Skeleton
from dsaccum.watch.operations import aside
from dsaccum.watch.subjects.end_clipping import EndClipping
from dsaccum.watch.subjects.members import Member, elements_of, saw_together, together, updates_before
from dsaccum.watch.subjects.plain import PlainAdapter
from dsaccum.watch.subjects.unowned import note_of, unowned
from dsaccum.watch.watching import DTYPE_NAMES, Watching
from dsaccum.watch.window import RunFacts

LONGEST = 16
"""Times as many micro-steps as an earlier window had: then its optimizer won't step any more, and what is kept of each
micro-step would fill the memory."""


def unwrapped(root: nn.Module) -> tuple[nn.Module, Any, str]:
    """The user's own module, the ranks that share its gradient, and what kind of run it is.

    Raises:
        NotGathered: its parameters are sharded in a way that is not watched.
    """
    if isinstance(root, nn.parallel.DistributedDataParallel):
        return root.module, root.process_group, "DDP"
    if (group := group_of(root)) is not None:
        return root, group, "FSDP2"
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return root, None, "bare, several ranks"
    return root, None, "bare"


class BareWatching(Watching):
    """One module, and the optimizers that step its parameters at the same boundary.

    Args:
        desk: where findings go.
        module: the user's own.
        skeleton: of it.
        group: ranks that share its gradient.
        optimizer: the first that stepped it.
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
        self._members = [Member(module, optimizer, self._backward)]
        self._aside: dict[int, int] = {}
        self._stepped: list[Member] = []
        self._reading = False
        self._root = root
        self._passes = 0
        self._alternates = False
        self._clipping = EndClipping(dict(module.named_parameters()))

    def first_step_made(self) -> None:
        """The optimizer's first step led to this watch being made."""
        if 1 in self.desk.windows:
            self.desk.say("without DeepSpeed the first window is used to find the model; watching from window 2 on")
        self.stepped()

    def join(self, optimizer: torch.optim.Optimizer) -> bool:
        """Another optimizer has made its first step; whether it belongs here, and steps when the others do."""
        names = self._members[0].adapter.names
        own = {id(p) for group in optimizer.param_groups for p in group["params"] if id(p) in names and p.requires_grad}
        if not own or self.over:
            return False
        taken = {id(p) for member in self._members for p in member.adapter.stepped.values()}
        if own & taken or self._passes or self.micro_steps:
            self._aside[id(optimizer)] = elements_of(optimizer)
            return False
        self._members.append(Member(self.module, optimizer, self._backward))
        return True

    def structure(self) -> Skeleton:
        """As it is now: scripts add layers, and change what is no parameter."""
        for member in self._members:
            member.adapter = PlainAdapter(self.module, member.optimizer)
        return Skeleton(self.module)

    def skipped(self) -> None:
        """A ``GradScaler`` found a gradient that is not finite: there was no step, and the window begins anew."""
        self._passes = 0
        if self.recording:
            self.stop_recording()
            self.desk.say(
                f"optimizer step {self.steps + 1} was skipped by its GradScaler, for a gradient was not finite; the "
                "next one is looked at in its place"
            )
            self.begin_if_due()

    def another_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """One that may be none of these: then what came before may have been for it, as when two models alternate."""
        if self._member(optimizer) is None:
            self._alternates = True
            if self.recorder is not None:
                self.recorder.another_stepped()

    def left(self) -> None:
        """Nothing stays on the run."""
        for member in self._members:
            member.leave()

    def _backward(self, member: Member) -> None:
        """One backward pass reached a member's smallest parameter."""
        if member is self._members[0]:
            self._passes += 1
        if self._stepped:
            self._cut_short()
        if self.recording and self.earlier and self._passes > LONGEST * max(self.earlier):
            self.refuse(f"a window of more than {LONGEST} times as many micro-steps as any before")

    def _cut_short(self) -> None:
        """Not all members stepped before the next backward: those that didn't have a boundary of their own."""
        missing = [member for member in self._members if member not in self._stepped]
        self._stepped = []
        for member in missing:
            member.leave()
            self._members.remove(member)
            self._aside[id(member.optimizer)] = elements_of(member.optimizer)
        if self._reading:
            self._reading = False
            self.over = True
            for member in self._members:
                member.observed = None
            self.stop_recording()
            self.left()
            self.desk.miss(
                f"not judged: {sum(self._aside.values()):,} parameters of {type(self.module).__name__} are stepped at "
                "other micro-steps than the rest of it; the script goes on"
            )

    @property
    def not_looked_at(self) -> int:
        """Elements that other optimizers step, or these step outside the module."""
        return sum(self._aside.values()) + sum(member.outside for member in self._members)

    def before_clip(self, tensors: list[Tensor]) -> None:
        """Keep the gradient from before the script's clipping."""
        with aside():
            self._clipping.before(tensors, self.micro_steps)

    def after_clip(self, norm: Any, limit: float) -> None:
        """What it did."""
        super().after_clip(norm, limit)
        self._clipping.after(norm, limit)

    def began(self) -> None:
        """A new window."""
        self._clipping = EndClipping(dict(self.module.named_parameters()))
        self._reduced: list[bool] = []
        recorder = self.recorder
        if recorder is not None and isinstance(self._root, nn.parallel.DistributedDataParallel):
            recorder.clock = self._clock

    def _clock(self) -> int:
        """Called at each micro-step: whether DDP is to reduce in it."""
        self._reduced.append(bool(getattr(self._root, "require_backward_grad_sync", True)))
        return len(self._reduced) - 1

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Of all members."""
        return [group for member in self._members for group in member.optimizer.param_groups]

    def expected_gradient_bytes(self, used: Sequence[Sequence[str]]) -> list[int] | None:
        """Under DDP every trained parameter, used or not, wherever it does not wait."""
        if self.kind != "DDP":
            return None
        whole = sum(p.numel() * p.element_size() for p in self.module.parameters() if p.requires_grad)
        return [whole if reduces else 0 for reduces in self._reduced[: len(used)]]

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer.step`` is about to run."""
        member = self._member(optimizer)
        if member is None:
            return
        if member in self._stepped:
            self._cut_short()
        first = not self._stepped
        if first:
            self._reading = self.all_record()
        if not self._reading:
            return
        try:
            with aside():
                if first:
                    self.clips = [clip.with_whole_norm() for clip in self.clips]
                    self._scaled = scaler_steps()
                    self._look_for_unowned()
                    self._values = {name: value.clone() for name, value in member.adapter.values().items()}
                member.before_step(self._clipping, self.micro_steps)
        except Exception as error:
            self._reading = False
            self.fail(error)

    def _look_for_unowned(self) -> None:
        """Where other optimizers step this module, too, parameters that none of these has may be theirs."""
        others = self._alternates or self._aside
        self._unowned = [] if others else unowned(self.module, self._members)
        left_over = [name for name in self._unowned if self.recorder and name in self.recorder.left_over]
        self._stale_clipped = self._clipping.acted_on(left_over, self.micro_steps)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """It has run."""
        member = self._member(optimizer)
        if member is None:
            return
        self._stepped.append(member)
        complete = len(self._stepped) == len(self._members)
        if self._reading and self.recording:
            try:
                with aside():
                    member.after_step()
                if complete:
                    self._finish()
            except Exception as error:
                self.fail(error)
            if complete:
                self._passes = 0
                self.stepped()
        elif len(self._stepped) == 1:
            passes, self._passes = self._passes, 0
            if passes and not self._alternates and self.kind != "FSDP2":  # else they are others', or not all are seen
                self.earlier.append(passes)
            self.stepped()
        if complete:
            self._stepped, self._reading = [], False

    def _member(self, optimizer: torch.optim.Optimizer) -> Member | None:
        return next((each for each in self._members if each.optimizer is optimizer), None)

    def _finish(self) -> None:
        steps = [member.observed for member in self._members if member.observed is not None]
        with aside():
            observed = together(steps)
            checksums = self._members[0].adapter.checksums()
        self._saw = saw_together(steps)
        read = [member.unclipped for member in self._members if member.unclipped is not None]
        extra: dict[str, Any] = {
            "engine": [1.0] * self.micro_steps,
            "checksums": checksums,
            "coefficients": {name: c for each in read for name, c in each.coefficients.items()},
            "after_clipping": next((each.factor for each in read if each.factor != 1.0), 1.0),
            "scaled": self._scaled,
            "not_looked_at": self.not_looked_at,
            "stale_clipped": self._stale_clipped,
            "notes": note_of(self._unowned),
        }
        self.finish(observed, self._facts(observed), self._values, extra)
        for member in self._members:
            member.observed, member.unclipped = None, None

    def saw(self, observed: ObservedStep) -> dict[str, SeenGradient] | None:
        """Of all members."""
        return self._saw

    def _facts(self, observed: ObservedStep) -> RunFacts:
        assert observed.before is not None
        assert self.recorder is not None
        first = self.recorder.micro_steps[0][0] if self.recorder.micro_steps else None
        trained = observed.before.masters
        own = next(iter(trained.values())).dtype if trained else torch.float32
        precision = DTYPE_NAMES.get(own, "fp32")
        if first is not None and first.autocast.enabled:
            precision = f"autocast {DTYPE_NAMES.get(first.autocast.dtype, 'bf16')}"
        return RunFacts(
            kind=self.kind,
            framework=self.framework,
            model=class_name(self.module),
            parameters=sum(value.numel() for value in observed.before.parameters.values()),
            trained=sum(value.numel() for value in trained.values()),
            zero_stage=None,
            precision=precision,
            accumulation_dtype=DTYPE_NAMES.get(own, "fp32"),
            communication_dtype=DTYPE_NAMES.get(own, "fp32"),
            accumulation_steps=None,
            micro_batch=None,
            clipping=self._clipping.limit(self.micro_steps),
            window=self.steps + 1,
            engine=self.number,
            earlier_windows=tuple(self.earlier),
            updates_before=updates_before(observed, self.steps),
        )
