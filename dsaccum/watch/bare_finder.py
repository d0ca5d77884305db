"""Finding optimizers of torch that step without an engine, and the module that each of them trains.

The module is the outermost one that was called before the optimizer's first step and has its parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dsaccum.watch.desk import Desk
from dsaccum.watch.fsdp import NotGathered
from dsaccum.watch.module_copy import CannotCopy, Skeleton
from dsaccum.watch.scaling import ScalerListener
from dsaccum.watch.subjects.bare import BareWatching, unwrapped


class BareFinder:
    """Sees every step of an optimizer by torch's global hooks.

    Calls of modules are seen until the first module is found: hooks on all of them cost time.

    Args:
        desk: where findings go.
        owned: whether an optimizer is an engine's.
    """

    def __init__(self, desk: Desk, owned: Callable[[Any], bool]) -> None:
        self._desk, self._owned = desk, owned
        # What is not watched must not be kept alive: a script may train one model after the other.
        self._watched: WeakKeyDictionary[Any, BareWatching | None] = WeakKeyDictionary()
        self._expected: Any = None  # to step, by a scaler
        self._roots: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
        self._subjects: list[BareWatching] = []
        self._depth = 0
        self._scalers = ScalerListener(self._before_scaler, self._after_scaler)
        self._handles: list[Any] = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._forward_handles: list[Any] = [
            nn.modules.module.register_module_forward_pre_hook(self._enter),
            nn.modules.module.register_module_forward_hook(self._leave, always_call=True),
        ]

    def stop(self) -> None:
        """Everything off."""
        self.look_no_further()
        self._scalers.stop()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._roots.clear()
        for each in self._subjects:
            each.stop_recording()

    def look_no_further(self) -> None:
        """Hooks on every module's call cost time."""
        for handle in self._forward_handles:
            handle.remove()
        self._forward_handles = []

    @property
    def unfinished(self) -> list[str]:
        """Those whose windows did not come to their end."""
        return [
            f"optimizer {each.number} made {each.steps} steps" + under_way(each)
            for each in self._subjects
            if not each.over
        ]

    def _enter(self, module: nn.Module, *_: Any) -> None:
        self._depth += 1
        if self._depth == 1 and torch.is_grad_enabled():
            try:
                self._remember(module)
            except Exception as error:
                self._desk.give_up("a module that was called can't be looked at", error)

    def _remember(self, module: nn.Module) -> None:
        if module not in self._roots and any(p.requires_grad for p in module.parameters()):
            self._roots[module] = None

    def _leave(self, *_: Any) -> None:
        self._depth -= 1

    def _before_step(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        if self._expected is optimizer:
            self._expected = None
        watching = self._watched.get(optimizer)
        if watching is None or watching.gone:
            return
        try:
            if _closure(arguments, keywords):
                watching.refuse("an optimizer that computes gradients within its step, in a closure")
            else:
                watching.before_step(optimizer)
        except Exception as error:
            watching.fail(error)

    def _after_step(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        for each in self._subjects:
            if not each.gone:
                each.another_stepped(optimizer)
        if optimizer not in self._watched:
            self._watched[optimizer] = None
            try:
                self._watched[optimizer] = self._found(optimizer, closure=_closure(arguments, keywords))
            except (CannotCopy, NotGathered) as error:
                self._desk.refuse(error)
            except Exception as error:
                self._desk.give_up("this optimizer can't be watched", error)
        elif (watching := self._watched[optimizer]) is not None and not watching.gone:
            try:
                watching.after_step(optimizer)
            except Exception as error:
                watching.fail(error)

    def _before_scaler(self, optimizer: Any) -> None:
        self._expected = optimizer

    def _after_scaler(self, optimizer: Any) -> None:
        skipped, self._expected = self._expected is optimizer, None
        watching = self._watched.get(optimizer)
        if skipped and watching is not None and not watching.gone:
            try:
                watching.skipped()
            except Exception as error:
                watching.fail(error)

    def _found(self, optimizer: Any, *, closure: bool) -> BareWatching | None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        if not trained or self._owned(optimizer):
            return None
        if closure:
            raise CannotCopy("an optimizer that computes gradients within its step, in a closure")
        for watching in self._subjects:
            if watching.join(optimizer):
                return watching
        held = {id(p) for p in parameters}
        for root in list(self._roots):
            if any(id(p) in held for p in root.parameters()):
                return self._watch(root, optimizer)
        if not any(held & {id(p) for p in each.module.parameters()} for each in self._subjects):
            self._desk.refuse(f"an optimizer of {trained:,} parameters, for no module that was called has them")
        return None

    def _watch(self, root: nn.Module, optimizer: Any) -> BareWatching | None:
        module, group, kind = unwrapped(root)
        if any(each.module is module for each in self._subjects):
            return None
        watching = BareWatching(self._desk, module, Skeleton(module), group, optimizer, kind, root)
        self._subjects.append(watching)
        self.look_no_further()
        watching.first_step_made()
        return watching


def _closure(arguments: Any, keywords: Any) -> bool:
    """Whether ``step`` was given one; the first of its arguments is the optimizer itself."""
    return next(iter(arguments[1:]), None) is not None or keywords.get("closure") is not None


def under_way(watching: Any) -> str:
    """How far a window came."""
    return f", and {watching.micro_steps} micro-steps since" if watching.recording else ""
