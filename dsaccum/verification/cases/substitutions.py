"""What is verified in place of what the JSON says: each change by name, none silent, none that the update rests on.

Every function here takes a JSON and returns a changed copy with one line per change.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dsaccum.batch import MICRO_BATCH_KEY, STEPS_KEY, TOTAL_KEY, EffectiveBatch
from dsaccum.config.combinations import is_compiled_here, look_up
from dsaccum.config.errors import ConfigError
from dsaccum.config.keys import AUTO, OBSERVERS
from dsaccum.config.optimizer import ADAM_FAMILY
from dsaccum.config.precision import resolve_numerics
from dsaccum.config.schema import Machine
from dsaccum.config.triangle import resolve_batch

Json = dict[str, Any]

_READ_HERE = ("optimizer", "zero_optimization", "fp16", "bf16", "torch_autocast", "data_types")
_OFFLOADS = {"offload_optimizer": "cpu_offload", "offload_param": "cpu_offload_param"}
"""The key of today, and the deprecated one."""
_BUCKETS = {"reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000}
_BUCKETS_AT_3 = {"reduce_bucket_size": 500_000_000, "stage3_prefetch_bucket_size": 50_000_000}
_PERSISTENCE, _DEFAULT_PERSISTENCE = "stage3_param_persistence_threshold", 100_000
_FEWEST_BUCKETS = 3


def substitute(written: Json, machine: Machine) -> tuple[Json, list[str]]:
    """Everything that this machine cannot run, or that only observes.

    Args:
        written: the JSON, its keys and types checked; ``"auto"`` may still stand in it.
        machine: where it is verified.

    Raises:
        ConfigError: fp16 in a way that is wrong on any machine; without a source.
    """
    notes: list[str] = []
    if any(written.get(name) == AUTO for name in _READ_HERE):
        return written, notes  # nothing stands for a whole section; the checks that follow refuse it
    for step in (without_observers, without_offload, without_fp16, without_fused_adam):
        written, more = step(written, machine)
        notes += more
    return written, notes


def verified_batch(
    written: Mapping[str, Any], ranks: int, accumulation_steps: int | None, micro_batch: int | None
) -> tuple[EffectiveBatch, list[str]]:
    """N and B as the JSON or the flags say, on ``ranks`` ranks; E follows, and a stated E is checked only.

    Where the JSON states E and one of N and B, the other follows from E on these ranks.

    Raises:
        ConfigError: a number is no positive whole number, too few are given, or they do not agree; without a source.
    """
    flags = {STEPS_KEY: accumulation_steps, MICRO_BATCH_KEY: micro_batch}
    given = {key: value for key, value in flags.items() if value is not None}
    wanted = {**written, **given}
    total = None if wanted.get(TOTAL_KEY) == AUTO else wanted.get(TOTAL_KEY)
    if any(wanted.get(key) in (None, AUTO) for key in flags):
        return resolve_batch(wanted, ranks, None, None)[0], []
    wanted.pop(TOTAL_KEY, None)
    batch, _ = resolve_batch(wanted, ranks, None, None)
    if total in (None, batch.total):
        return batch, []
    product = f"{batch.accumulation_steps} x {batch.micro_batch}"
    return batch, [
        f"effective batch {total} of the JSON{'' if given else _its_ranks(total, batch)} is verified as "
        f"{batch.total} on {ranks} rank{'' if ranks == 1 else 's'} ({ranks} x {product})"
    ]


def _its_ranks(total: Any, batch: EffectiveBatch) -> str:
    """On how many ranks the JSON's three numbers agree."""
    steps, rows = batch.accumulation_steps, batch.micro_batch
    if isinstance(total, bool) or not isinstance(total, int) or total < 1 or total % (steps * rows):
        problem = f"is no multiple of {STEPS_KEY} x {MICRO_BATCH_KEY} = {steps * rows}, so it fits no number of ranks"
        fix = f'"{TOTAL_KEY}": {batch.total}, or delete it'
        raise ConfigError(problem, key=TOTAL_KEY, value=total, fix=fix)
    return f" ({total // (steps * rows)} ranks x {steps} x {rows})"


def without_observers(written: Json, machine: Machine) -> tuple[Json, list[str]]:
    """Monitors, profilers and chatter are off; that is no substitution, since nothing verified rests on them."""
    return drop_observers(written), []


def drop_observers(written: Mapping[str, Any]) -> Json:
    """The JSON without what only watches a run."""
    return {key: value for key, value in written.items() if key not in OBSERVERS}


def without_offload(written: Json, machine: Machine) -> tuple[Json, list[str]]:
    """States and parameters stay on the device that computes."""
    changed, notes = copy.deepcopy(written), []
    section = changed.get("zero_optimization", {})
    for key, deprecated in _OFFLOADS.items():
        target = section.pop(key, None)
        moved = isinstance(target, dict) and target.get("device", "none") != "none"
        if section.pop(deprecated, None) or moved:
            notes.append(f"{key} is left out: it decides where numbers are kept, not what they are")
    return changed, notes


def without_fp16(written: Json, machine: Machine) -> tuple[Json, list[str]]:
    """fp32 where the device has no fp16; what is wrong with fp16 anywhere is refused as ever."""
    precision = "fp16" if look_up(written, "fp16.enabled") is True else None
    if look_up(written, "torch_autocast.enabled") is True and _is_fp16(look_up(written, "torch_autocast.dtype")):
        precision = "torch_autocast"
    if machine.supports_fp16 or precision is None:
        return written, []
    stage = look_up(written, "zero_optimization.stage")
    # A GPU would refuse it too: then fp32 in its place would prove the wrong thing.
    resolve_numerics(written, stage if isinstance(stage, int) else 0, replace(machine, supports_fp16=True))
    changed = copy.deepcopy(written)
    changed[precision] = {"enabled": False}
    if _is_fp16(look_up(changed, "data_types.grad_accum_dtype")):
        del changed["data_types"]["grad_accum_dtype"]
    if _is_fp16(changed.get("communication_data_type")):
        del changed["communication_data_type"]
    what = "fp16" if precision == "fp16" else "torch_autocast in fp16"
    return changed, [f"{what} needs a GPU: fp32 instead, so loss scaling is not verified"]


def without_fused_adam(written: Json, machine: Machine) -> tuple[Json, list[str]]:
    """The Adam of torch where DeepSpeed would compile its own on a CPU.

    That takes 40 s and more on the first use, fails without a compiler, and its lock outlives a start that was ended.

    An option that it does not have stays, for the check of the optimizer's parameters to refuse.
    """
    name = str(look_up(written, "optimizer.type")).lower()
    if machine.device != "cpu" or name not in ADAM_FAMILY or not is_compiled_here(written, machine):
        return written, []
    changed = copy.deepcopy(written)
    parameters = changed["optimizer"].setdefault("params", {})
    if parameters == AUTO:
        return written, []
    if parameters.get("bias_correction") is True:
        del parameters["bias_correction"]  # torch's always corrects
    parameters.pop("set_grad_none", None)
    parameters["torch_adam"] = True
    parameters.setdefault("weight_decay", 0.0)  # FusedAdam's default; torch.optim.AdamW's is 0.01
    decoupled = name == "adamw" or parameters.get("adam_w_mode", True)
    instead = f"torch.optim.{'AdamW' if decoupled else 'Adam'}"
    own = '"torch_adam": true in optimizer.params asks for it'
    return changed, [f"FusedAdam would be compiled for this CPU: {instead} instead, with the same formula ({own})"]


def with_small_buckets(
    config: Json, trained_sizes: Sequence[int], share: float, world_size: int = 1
) -> tuple[Json, list[str]]:
    """ZeRO's buckets sized to the model, so that at least three are filled, as they are in a large one.

    Left at their default of 5e8 elements they would also cost 2 GB each, whatever the model.

    Args:
        config: the resolved JSON.
        trained_sizes: elements of each trained parameter of the verified model.
        share: its parameters over those of the user's model; below 1 where it was shrunk.
        world_size: W; ZeRO wants buckets that are multiples of 2 W.
    """
    section = config.get("zero_optimization", {})
    stage = int(section.get("stage") or 0)
    if stage == 0:
        return config, []
    third = -(-sum(trained_sizes) // _FEWEST_BUCKETS)
    largest = -(-third // (2 * world_size)) * 2 * world_size
    buckets = _BUCKETS_AT_3 if stage == 3 else _BUCKETS
    changes = {key: largest for key, default in buckets.items() if section.get(key, default) > largest}
    if stage == 3 and share < 1:
        # Smaller parameters stay whole on every rank; of a shrunk model that would be all of them.
        threshold = int(section.get(_PERSISTENCE, _DEFAULT_PERSISTENCE) * share)
        changes[_PERSISTENCE] = min(threshold, max(trained_sizes) - 1)
    if not changes:
        return config, []
    named = ", ".join(f"{key} {size:,}" for key, size in changes.items())
    return {**config, "zero_optimization": {**section, **changes}}, [f"buckets sized to the model: {named}"]


def _is_fp16(value: Any) -> bool:
    return value in ("fp16", "float16", "half", "torch.float16")
