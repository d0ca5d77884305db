"""How many micro-batches a window is to have, where a framework without DeepSpeed was told."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import FrameType

from dsaccum.watch.window import RunFacts


def with_told_steps(facts: RunFacts) -> RunFacts:
    """What Trainer's arguments or the Accelerator say; called while the optimizer steps.

    Who makes an Accelerator that accumulates drives the run by it, though its own frames don't show where the optimizer
    was never prepared.
    """
    if facts.accumulation_steps is not None or facts.kind == "DeepSpeed":
        return facts
    if facts.framework in ("Trainer", "TRL"):
        return replace(facts, accumulation_steps=_trainers())
    if facts.framework in ("Accelerate", "") and (steps := _accelerators()) is not None:
        return replace(facts, framework="Accelerate", accumulation_steps=steps)
    return facts


def _trainers() -> int | None:
    """Of the Trainer that is running."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        driver = frame.f_locals.get("self")
        if any(kind.__module__.startswith("transformers.trainer") for kind in type(driver).__mro__):
            steps = getattr(getattr(driver, "args", None), "gradient_accumulation_steps", None)
            if isinstance(steps, int):
                return steps
        frame = frame.f_back
    return None


def _accelerators() -> int | None:
    """None where it was left at 1: then a loop may well accumulate by itself."""
    state = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    steps = getattr(state, "_shared_state", {}).get("plugin_kwargs", {}).get("num_steps")
    return steps if isinstance(steps, int) and steps > 1 else None
