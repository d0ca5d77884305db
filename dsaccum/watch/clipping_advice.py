"""What is said of a gradient that was clipped to something else than the limit."""

from __future__ import annotations

from dsaccum.verification.diagnosis.named import Named
from dsaccum.watch.judge import Judged

SUMMARY = "the gradient that reached the optimizer is not clipped to the limit"
"""Without an engine, whose JSON would say it."""

_FIRST_DIVIDE = "clip what the optimizer gets: divide the gradients before clip_grad_norm_, not after it"

_NO_OPTIMIZER = (
    "give the parameters named here to the optimizer (it was made before they were put into the model?), or switch "
    "their requires_grad off; model.zero_grad() would clear what optimizer.zero_grad() does not reach"
)


def clipping_mismatch(judged: Judged, reason: str) -> Named:
    """The cause, with the fix that fits what was seen: a scaler, or a factor that came after clipping."""
    first = judged.window.ranks[0]
    if first.stale_clipped:
        return Named(("stale-gradients",), {"parameters": first.stale_clipped}, reason, _NO_OPTIMIZER)
    if first.after_clipping == 1.0:
        return Named(("clipping-mismatch",), {}, reason)
    fix = _FIRST_DIVIDE
    if first.scaled and judged.facts.framework:
        fix = "clip by accelerator.clip_grad_norm_, which takes the scale of GradScaler out first"
    elif first.scaled:
        fix = "call scaler.unscale_(optimizer) before clip_grad_norm_: the gradients still hold the scale of GradScaler"
    return Named(("clipping-mismatch",), {"multiplied_after_clipping": first.after_clipping}, reason, fix)
