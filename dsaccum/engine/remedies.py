"""Where DeepSpeed is wrong and a sound remedy exists on our side; each is found by behaviour, not by version."""

from __future__ import annotations

from typing import Any


def apply_remedies(engine: Any) -> list[str]:
    """Mend what can be mended right after ``deepspeed.initialize``; returns one line for each remedy applied."""
    return [remedy for remedy in (_undo_empty_step(engine),) if remedy]


def _undo_empty_step(engine: Any) -> str | None:
    """bf16 at ZeRO 0: take back the optimizer step that DeepSpeed's wrapper makes at start, with gradients of zero.

    It leaves Adam's bias correction one count ahead (the first update is 0.744 of the right one) and applies weight
    decay once too often to the fp32 master weights. The bf16 weights are untouched by it, so the masters are taken
    from them again; an optimizer without state starts at count 0.
    """
    wrapper = engine.optimizer
    base = getattr(wrapper, "optimizer", None)
    makes_empty_step = engine.zero_optimization_stage() == 0 and hasattr(wrapper, "initialize_optimizer_states")
    if base is None or not makes_empty_step or not base.state:
        return None
    base.state.clear()
    for group in base.param_groups:
        if "step" in group:
            group["step"] = 0
    wrapper.refresh_fp32_params()
    return (
        f"remedy: DeepSpeed's {type(wrapper).__name__} made an empty optimizer step at start; "
        "optimizer state and fp32 master weights were set back to before it"
    )
