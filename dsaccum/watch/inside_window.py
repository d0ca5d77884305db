"""Causes of a wrong gradient that were seen happening inside the window, where no engine keeps scripts from them."""

from __future__ import annotations

from dsaccum.report.figures import numbered
from dsaccum.verification.comparison.gradient_check import GradientCheck
from dsaccum.verification.diagnosis.causes import UNKNOWN
from dsaccum.verification.diagnosis.named import Named
from dsaccum.watch.fixes import INVERTED_NO_SYNC_FIX
from dsaccum.watch.judge import Judged


def seen_inside(judged: Judged) -> list[Named]:
    """The first of them that was seen."""
    for look in (_parameters_changed, _left_over, _stepped_late):
        if (found := look(judged)) is not None:
            return [found]
    return []


def _parameters_changed(judged: Judged) -> Named | None:
    """Micro-batches of one window saw different models: no weights can make one batch of them."""
    for rank in judged.window.ranks:
        if rank.changed is not None:
            step, name = rank.changed
            return Named(
                (UNKNOWN,),
                {"micro_step": step, "parameter": name, "rank": rank.rank},
                f"parameters changed inside the window: micro-step {step} ran with another {name} than micro-step 1",
                "let nothing write to the parameters between the window's first forward and optimizer.step(): put the "
                "training weights back right after an evaluation with others, such as an average of them",
            )
    return None


def _left_over(judged: Judged) -> Named | None:
    """Gradients of an earlier window were there when the first backward began."""
    left = judged.window.ranks[0].left_over
    if not left or judged.facts.zero_stage is not None:
        return None
    held = f"{len(left)} parameters held" if len(left) > 1 else "1 parameter held"
    return Named(
        ("stale-gradients",),
        {"parameters": left},
        f"{held} a gradient when the window's first backward began: {left[0]}",
        "clear all gradients after each step: zero_grad() of every optimizer, or model.zero_grad()",
    )


def _stepped_late(judged: Judged) -> Named | None:
    """Ranks were averaged after micro-step k, and each went on alone until the optimizer stepped."""
    checks = judged.weighting or judged.way
    truth = judged.weighting_truth or judged.way_truth
    steps, world = judged.window.micro_steps, len(judged.window.ranks)
    if world < 2 or judged.facts.zero_stage is not None:
        return None
    for k in range(1, steps):
        if all(_reduced_up_to(check, truth.due, r, k) for r, check in enumerate(checks)):
            reduced = _reduced_at(judged)
            if len(reduced) > 1:
                return Named(
                    ("ranks-not-reduced",),
                    {"reduced_after": reduced, "stepped_after": steps},
                    f"ranks were averaged after {numbered('micro-step', reduced)}, and not after the last, {steps}",
                    INVERTED_NO_SYNC_FIX,
                )
            return Named(
                ("boundary-shifted",),
                {"reduced_after": k, "stepped_after": steps},
                f"ranks were averaged after micro-step {k}, and the optimizer stepped after {steps}",
                "step right after the micro-step that runs outside no_sync(), by the same condition",
            )
    return None


def _reduced_at(judged: Judged) -> list[int]:
    """Micro-steps, from 1, in which DDP was not told to wait; empty where that is not known."""
    return [k for k, size in enumerate(judged.window.ranks[0].expected_gradient_bytes or [], start=1) if size]


def _reduced_up_to(check: GradientCheck, due: list[list[float]], rank: int, k: int) -> bool:
    """Up to k what is due, from there on the rank's own alone, which nobody averages."""
    world = len(due[0])
    predicted = [
        w if step < k else (w * world if r == rank else 0.0) for step, row in enumerate(due) for r, w in enumerate(row)
    ]
    flat = [w for row in due for w in row]
    found = check.recovered.weights
    return all(
        w is not None and abs(w - p) <= 2 * check.tolerance * max(p, d)
        for w, p, d in zip(found, predicted, flat, strict=True)
    )
