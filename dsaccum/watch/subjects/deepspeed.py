"""A DeepSpeed engine: the boundary is ``engine._take_model_step``, when reduction is done and clipping isn't."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from dsaccum.instruments.adapters import adapter_for
from dsaccum.instruments.assembly import data_parallel_group
from dsaccum.instruments.collectives import BACKWARD, UPDATE
from dsaccum.instruments.gradients import ObservedStep, read_gradients, take_snapshot
from dsaccum.instruments.replicas import parameter_checksums
from dsaccum.instruments.traffic import expected_traffic, plan_of
from dsaccum.watch.desk import Desk
from dsaccum.watch.module_copy import Skeleton
from dsaccum.watch.operations import aside
from dsaccum.watch.recording import Forward
from dsaccum.watch.watching import DTYPE_NAMES, Watching
from dsaccum.watch.window import RunFacts


class Refused(Exception):
    """This kind of engine is not watched; the message says why."""


class NeverSteps(Refused):
    """It trains nothing, as the engine of a reference model."""


def refuse_what_cannot_be_watched(engine: Any) -> None:
    """Say so at the start.

    Raises:
        Refused: pipeline engines, hybrid engines, offload, no optimizer.
    """
    kind = type(engine).__name__
    if kind == "PipelineEngine":
        raise Refused("a pipeline engine makes its micro-steps by itself, where no forward of the module can be seen")
    if kind != "DeepSpeedEngine":
        raise Refused(f"{kind} is not watched, only DeepSpeedEngine")
    if getattr(engine, "optimizer", None) is None or not hasattr(engine.optimizer, "param_groups"):
        raise NeverSteps("this engine has no optimizer, so that it never steps")
    try:
        adapter_for(engine)
    except NotImplementedError as error:
        raise Refused(str(error)) from error


_WATCHED = ("backward", "step", "forward", "buffered_allreduce_fallback")


class EngineWatching(Watching):
    """One engine.

    Args:
        desk: where findings go.
        engine: as ``deepspeed.initialize`` returned it.
        skeleton: of the module, from before.
        framework: who called it.
    """

    def __init__(self, desk: Desk, engine: Any, skeleton: Skeleton, framework: str) -> None:
        super().__init__(desk, engine.module, skeleton, data_parallel_group(engine))
        self.engine, self.framework = engine, framework
        self._take_model_step = engine._take_model_step
        self._inside = False
        self._at_loss: list[float | Callable[[], float]] = []
        self._step_calls = 0
        self._hook: Any = None
        self._replaced: dict[str, Any] = {}
        engine._take_model_step = self._boundary
        self.begin_if_due()

    def began(self) -> None:
        """Look at what is handed to ``backward``, count calls of ``step``, and see steps past the engine."""
        engine, self._at_loss, self._step_calls = self.engine, [], 0
        backward, step, forward = engine.backward, engine.step, engine.forward
        reduce = engine.buffered_allreduce_fallback
        recorder, measures = self.recorder, self.measures
        assert recorder is not None
        assert measures is not None
        recorder.clock = lambda: self._step_calls

        def watched_forward(*arguments: Any, **keywords: Any) -> Any:
            output = forward(*arguments, **keywords)
            recorder.passed_on(output)
            return output

        def watched_backward(loss: Any, *arguments: Any, **keywords: Any) -> Any:
            at_output = recorder.scalar_output(loss)
            if at_output is not None:  # the engine's hooks there came before any of ours would
                self._at_loss.append(at_output)
            elif isinstance(loss, torch.Tensor) and loss.requires_grad and loss.numel() == 1:
                loss.register_hook(lambda gradient: self._at_loss.append(float(gradient)))
            with measures.during(BACKWARD):
                return backward(loss, *arguments, **keywords)

        def watched_step(*arguments: Any, **keywords: Any) -> Any:
            self._step_calls += 1
            with measures.during(UPDATE):
                return step(*arguments, **keywords)

        def watched_reduction(*arguments: Any, **keywords: Any) -> Any:
            with measures.during(BACKWARD):
                return reduce(*arguments, **keywords)

        self._replaced = {name: engine.__dict__.get(name) for name in _WATCHED}
        engine.backward, engine.step, engine.forward = watched_backward, watched_step, watched_forward
        engine.buffered_allreduce_fallback = watched_reduction
        base = getattr(engine.optimizer, "optimizer", engine.optimizer)
        if hasattr(base, "register_step_pre_hook"):
            self._hook = base.register_step_pre_hook(self._before_optimizer_step)

    def stop_recording(self) -> Any:
        """Also what was put over the engine."""
        for name, before in self._replaced.items():
            if before is None:
                self.engine.__dict__.pop(name, None)
            else:
                self.engine.__dict__[name] = before
        self._replaced = {}
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        return super().stop_recording()

    def left(self) -> None:
        """The engine is as it was."""
        self.engine.__dict__.pop("_take_model_step", None)

    def _before_optimizer_step(self, *_: Any) -> None:
        if not self._inside:
            self.past_engine.append(self.micro_steps)

    def _boundary(self, *arguments: Any, **keywords: Any) -> Any:
        observed = self._before() if self.all_record() else None
        skipped = self.engine.skipped_steps
        self._inside = True
        try:
            result = self._take_model_step(*arguments, **keywords)
        finally:
            self._inside = False
        if observed is not None:
            observed.applied = self.engine.skipped_steps == skipped
            try:
                self._finish(observed)
            except Exception as error:
                self.fail(error)
        self.stepped()
        return result

    def _before(self) -> ObservedStep | None:
        try:
            with aside():
                return self._read()
        except Exception as error:
            self.fail(error)
            return None

    def _read(self) -> ObservedStep:
        """What the optimizer is about to get. At ZeRO 1 to 3 ranks exchange their parts."""
        engine, base = self.engine, getattr(self.engine.optimizer, "optimizer", self.engine.optimizer)
        scale = float(getattr(engine.optimizer, "loss_scale", None) or 1.0)
        return ObservedStep(read_gradients(engine), scale, take_snapshot(engine), optimizer=base)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Of the engine's optimizer."""
        return list(getattr(self.engine.optimizer, "param_groups", []))

    def expected_gradient_bytes(self, used: Sequence[Sequence[str]]) -> list[int] | None:
        """By the formula of ``verify``: of all that the window uses, or at ZeRO 2 and 3 of what the micro-step uses."""
        try:
            trained = [name for name, p in self.engine.module.named_parameters() if p.requires_grad]
            anywhere = {name for names in used for name in names}
            due = []
            for k, names in enumerate(used):
                at = set(names) if self.engine.zero_optimization_stage() >= 2 else anywhere
                plan = plan_of(self.engine, [name for name in trained if name not in at])
                due.append(expected_traffic(replace(plan, accumulation_steps=len(used)))[k].gradient_bytes)
            return due
        except Exception:  # a wrapper that the formula does not know
            return None

    def _finish(self, observed: ObservedStep) -> None:
        assert observed.before is not None
        assert self.recorder is not None
        with aside():
            observed.after = take_snapshot(self.engine)
            checksums = parameter_checksums(self.engine)
        extra = {
            "engine": _engine_factors(self.recorder.micro_steps, self._at_loss, observed.loss_scale),
            "step_calls": self._step_calls,
            "checksums": checksums,
        }
        device = torch.device(self.engine.device)
        values = {name: value.to(device) for name, value in observed.before.parameters.items()}
        self.finish(observed, self._facts(observed), values, extra)

    def _facts(self, observed: ObservedStep) -> RunFacts:
        assert observed.before is not None
        engine, parameters = self.engine, observed.before.parameters
        first = self.recorder.micro_steps[0][0] if self.recorder and self.recorder.micro_steps else None
        trained = {name: value for name, value in parameters.items() if name in observed.before.masters}
        own = next(iter((trained or parameters).values())).dtype
        precision = DTYPE_NAMES.get(own, str(own))
        if first is not None and first.autocast.enabled:
            precision = f"autocast {DTYPE_NAMES.get(first.autocast.dtype, 'bf16')}"
        accumulated = next((g.dtype for g in observed.gradients.values() if g is not None), own)
        return RunFacts(
            kind="DeepSpeed",
            framework=self.framework,
            model=type(self.module).__name__,
            parameters=sum(value.numel() for value in parameters.values()),
            trained=sum(value.numel() for value in trained.values()),
            zero_stage=int(engine.zero_optimization_stage()),
            precision=precision,
            accumulation_dtype=DTYPE_NAMES.get(accumulated, str(accumulated)),
            communication_dtype=DTYPE_NAMES.get(getattr(engine, "communication_data_type", own), "fp32"),
            accumulation_steps=int(engine.gradient_accumulation_steps()),
            micro_batch=int(engine.train_micro_batch_size_per_gpu()),
            clipping=float(engine.gradient_clipping()),
            window=self.steps + 1,
            engine=self.number,
            earlier_windows=tuple(self.earlier),
            updates_before=int(engine.global_steps) - int(engine.skipped_steps) - int(observed.applied),
        )


def _engine_factors(
    micro_steps: list[list[Forward]], at_loss: list[float | Callable[[], float]], loss_scale: float
) -> list[float]:
    """What the engine multiplied each micro-step by: at the loss it was handed, and by its hooks at the outputs."""
    factors = []
    for k, forwards in enumerate(micro_steps):
        at_outputs = [forward.engine_factor() for forward in forwards]
        at_outputs_mean = sum(at_outputs) / len(at_outputs)
        handed = at_loss[k] if k < len(at_loss) else 1.0
        factors.append((handed() if callable(handed) else handed) * at_outputs_mean / loss_scale)
    return factors
