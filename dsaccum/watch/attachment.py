"""Finding what to watch in a script that knows nothing of it: engines, modules under DDP, and bare optimizers.

``deepspeed.initialize`` is wrapped when the script imports it, or at once where it is there already, under any name;
a script that never imports DeepSpeed doesn't get to see it. Of what has no engine, the optimizer's
steps are seen by torch's own global hooks; its module is the outermost one called in the first window that has the
optimizer's parameters.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dsaccum.watch.after_import import AfterImport
from dsaccum.watch.clipping import listen_from_the_start
from dsaccum.watch.desk import Desk, framework
from dsaccum.watch.module_copy import CannotCopy, Skeleton
from dsaccum.watch.subjects.bare import BareWatching, unwrapped
from dsaccum.watch.subjects.deepspeed import EngineWatching, Refused, refuse_what_cannot_be_watched


class Attachment:
    """Watches whatever is made from now on in this process.

    Args:
        desk: what to look at, and where findings go.
    """

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.engines: list[EngineWatching] = []
        self.bare = _BareFinder(desk, self)
        self._finder: Any = None
        self._original: Any = None
        self._wrapped: Any = None
        listen_from_the_start()
        self._wrap_initialize()

    def detach(self) -> None:
        """Take everything off again."""
        self.bare.stop()
        for engine in self.engines:
            engine.stop_recording()
            engine.left()
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        if self._wrapped is not None:
            _replace_everywhere(self._wrapped, self._original)

    def owned(self, parameter: Any) -> bool:
        """Whether an engine has it."""
        return any(id(parameter) in engine.own_parameters for engine in self.engines)

    @property
    def unfinished(self) -> list[str]:
        """Subjects whose windows did not come to their end."""
        told = [
            f"engine {each.number} made {each.steps} optimizer steps" + _under_way(each)
            for each in self.engines
            if not each.over
        ]
        return told + self.bare.unfinished

    def _wrap_initialize(self) -> None:
        if "deepspeed" in sys.modules:
            self._wrap(sys.modules["deepspeed"])
        else:
            self._finder = AfterImport("deepspeed", self._wrap)
            sys.meta_path.insert(0, self._finder)

    def _wrap(self, deepspeed: Any) -> None:
        self._original = deepspeed.initialize
        self._wrapped = self._watched_initialize(self._original)
        _replace_everywhere(self._original, self._wrapped)

    def _watched_initialize(self, original: Any) -> Any:
        @functools.wraps(original)
        def initialize(*arguments: Any, **keywords: Any) -> Any:
            module = keywords.get("model", arguments[1] if len(arguments) > 1 else None)
            skeleton = self._skeleton(module)
            result = original(*arguments, **keywords)
            if skeleton is not None:
                self._watch_engine(result[0], skeleton)
            return result

        return initialize

    def _skeleton(self, module: Any) -> Skeleton | None:
        if not isinstance(module, nn.Module):
            return None
        try:
            return Skeleton(module)
        except CannotCopy as error:
            self.desk.say(f"not watched: {error}; the script goes on")
        except Exception as error:
            self.desk.give_up("the model can't be copied", error)
        return None

    def _watch_engine(self, engine: Any, skeleton: Skeleton) -> None:
        try:
            refuse_what_cannot_be_watched(engine)
            self.engines.append(EngineWatching(self.desk, engine, skeleton, framework()))
            self.bare.look_no_further()
        except Refused as error:
            self.desk.say(f"not watched: {error}; the script goes on")
        except Exception as error:
            self.desk.give_up("this engine can't be watched", error)


class _BareFinder:
    """Optimizers of torch that step without an engine.

    Each parameter group's module is looked for in the optimizer's first window, by torch's global forward hooks; they
    are taken off when it is found.
    """

    def __init__(self, desk: Desk, attachment: Attachment) -> None:
        self._desk, self._attachment = desk, attachment
        self._watched: dict[int, BareWatching | None] = {}
        self._roots: list[nn.Module] = []
        self._depth = 0
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
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for each in self._watched.values():
            if each is not None:
                each.stop_recording()

    def look_no_further(self) -> None:
        """Hooks on every module's call cost time."""
        for handle in self._forward_handles:
            handle.remove()
        self._forward_handles, self._roots = [], []

    @property
    def unfinished(self) -> list[str]:
        """Those whose windows did not come to their end."""
        subjects = {id(each): each for each in self._watched.values() if each is not None}
        return [
            f"optimizer {each.number} made {each.steps} steps" + _under_way(each)
            for each in subjects.values()
            if not each.over
        ]

    def _enter(self, module: nn.Module, *_: Any) -> None:
        outermost = self._depth == 0 and torch.is_grad_enabled()
        new = outermost and all(module is not each for each in self._roots)
        if new and any(p.requires_grad for p in module.parameters()):
            self._roots.append(module)
        self._depth += 1

    def _leave(self, *_: Any) -> None:
        self._depth -= 1

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        watching = self._watched.get(id(optimizer))
        if watching is not None:
            watching.before_step(optimizer)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if id(optimizer) not in self._watched:
            self._watched[id(optimizer)] = None
            self._watched[id(optimizer)] = self._found(optimizer)
        elif (watching := self._watched[id(optimizer)]) is not None:
            watching.after_step(optimizer)

    def _found(self, optimizer: Any) -> BareWatching | None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not parameters or any(self._attachment.owned(p) for p in parameters) or _is_inner(optimizer):
            return None
        for watching in {id(each): each for each in self._watched.values() if each is not None}.values():
            if watching.join(optimizer):
                return watching
        held = {id(p) for p in parameters}
        for root in self._roots:
            own = [id(p) for p in root.parameters()]
            if held & set(own):
                return self._watch(root, optimizer)
        return None

    def _watch(self, root: nn.Module, optimizer: Any) -> BareWatching | None:
        try:
            if any(type(p).__name__ == "DTensor" for p in root.parameters()):
                self._desk.say("not watched: FSDP2's sharded parameters; the script goes on")
                return None
            module, group, kind = unwrapped(root)
            watching = BareWatching(self._desk, module, Skeleton(module), group, optimizer, kind, root)
            self.look_no_further()
            watching.first_step_made()
        except CannotCopy as error:
            self._desk.say(f"not watched: {error}; the script goes on")
            return None
        except Exception as error:
            self._desk.give_up("this optimizer can't be watched", error)
            return None
        return watching


def _is_inner(optimizer: Any) -> bool:
    """It belongs to a wrapper of DeepSpeed's, whose parameters are flat masters."""
    return type(optimizer).__module__.startswith("deepspeed.runtime")


def _under_way(watching: Any) -> str:
    return f", and {watching.micro_steps} micro-steps since" if watching.recording else ""


def _replace_everywhere(old: Any, new: Any) -> None:
    """In every loaded module that has the function under some name."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict):
            continue
        for name, value in list(names.items()):
            if value is old and not name.startswith("_original"):
                names[name] = new
