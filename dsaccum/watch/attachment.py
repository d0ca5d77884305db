"""Finding what to watch in a script that knows nothing of it: engines, modules under DDP, and bare optimizers.

``deepspeed.initialize`` is wrapped when the script imports it, or at once where it is there already, under any name;
a script that never imports DeepSpeed doesn't get to see it. What has no engine, ``bare_finder`` finds.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import nn

from dsaccum.watch.after_import import AfterImport
from dsaccum.watch.bare_finder import BareFinder, under_way
from dsaccum.watch.clipping import listen_from_the_start
from dsaccum.watch.desk import Desk, framework
from dsaccum.watch.module_copy import CannotCopy, Skeleton
from dsaccum.watch.subjects.deepspeed import EngineWatching, NeverSteps, Refused, refuse_what_cannot_be_watched


class Attachment:
    """Watches whatever is made from now on in this process.

    Args:
        desk: what to look at, and where findings go.
    """

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.engines: list[EngineWatching] = []
        self.bare = BareFinder(desk, self.owned)
        self._finder: Any = None
        self._original: Any = None
        self._wrapped: Any = None
        self._modules: list[nn.Module] = []
        self._optimizers: list[Any] = []
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

    def owned(self, optimizer: Any) -> bool:
        """Whether it is an engine's, watched or not, or steps parameters of one."""
        if any(optimizer is own for own in self._optimizers):
            return True
        own = {id(parameter) for module in self._modules for parameter in module.parameters()}
        return any(id(p) in own for group in optimizer.param_groups for p in group["params"])

    @property
    def unfinished(self) -> list[str]:
        """Subjects whose windows did not come to their end."""
        told = [
            f"engine {each.number} made {each.steps} optimizer steps" + under_way(each)
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
        self._original = getattr(deepspeed, "initialize", None)
        if self._original is None:  # a folder or module of the script's own of this name
            return
        self._wrapped = self._watched_initialize(self._original)
        _replace_everywhere(self._original, self._wrapped)

    def _watched_initialize(self, original: Any) -> Any:
        @functools.wraps(original)
        def initialize(*arguments: Any, **keywords: Any) -> Any:
            module = keywords.get("model", arguments[1] if len(arguments) > 1 else None)
            skeleton = self._skeleton(module)
            result = original(*arguments, **keywords)
            self._watch_engine(result[0], skeleton)
            return result

        return initialize

    def _skeleton(self, module: Any) -> Skeleton | None:
        if not isinstance(module, nn.Module):
            return None
        try:
            return Skeleton(module)
        except CannotCopy as error:
            self.desk.refuse(error)
        except Exception as error:
            self.desk.give_up("the model can't be copied", error)
        return None

    def _watch_engine(self, engine: Any, skeleton: Skeleton | None) -> None:
        try:
            self._own(engine)
            refuse_what_cannot_be_watched(engine)
            if skeleton is not None:
                self.engines.append(EngineWatching(self.desk, engine, skeleton, framework()))
                self.bare.look_no_further()
        except NeverSteps as error:
            self.desk.say(f"not watched: {error}")
        except Refused as error:
            self.desk.refuse(error)
        except Exception as error:
            self.desk.give_up("this engine can't be watched", error)

    def _own(self, engine: Any) -> None:
        """What steps it is not to be looked at as if there were no engine, also where the engine is refused."""
        if isinstance(module := getattr(engine, "module", None), nn.Module):
            self._modules.append(module)
        optimizer = getattr(engine, "optimizer", None)
        while optimizer is not None and not any(optimizer is own for own in self._optimizers):
            self._optimizers.append(optimizer)
            optimizer = getattr(optimizer, "optimizer", None)


def _replace_everywhere(old: Any, new: Any) -> None:
    """In every loaded module that has the function under some name."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict):
            continue
        for name, value in list(names.items()):
            if value is old and not name.startswith("_original"):
                names[name] = new
