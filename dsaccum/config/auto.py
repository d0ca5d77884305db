"""What the DeepSpeed JSON leaves as ``"auto"``: filled in from the experiment, left to DeepSpeed, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from dsaccum.config.errors import ConfigError
from dsaccum.config.experiment import Experiment
from dsaccum.config.keys import AUTO
from dsaccum.config.schema import DeepSpeedSchema

KeyPath = tuple[str, ...]
Filler = Callable[[Experiment, dict[str, Any]], Any]

# Sizes of buffers and thresholds: they change speed and memory, not the update, so DeepSpeed's defaults will do.
_LEFT_TO_DEEPSPEED = {
    ("zero_optimization", name)
    for name in (
        "reduce_bucket_size",
        "allgather_bucket_size",
        "sub_group_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        "stage3_model_persistence_threshold",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
    )
}

_EXAMPLES = {
    "lr": "1e-3",
    "betas": "[0.9, 0.95]",
    "eps": "1e-8",
    "weight_decay": "0.1",
    "warmup_max_lr": "1e-3",
    "warmup_num_steps": "10",
    "gradient_clipping": "1.0",
}


def unused_auto_values(config: dict[str, Any], experiment: Experiment) -> list[str]:
    """A warning for each value of the experiment's ``auto`` block that no ``"auto"`` of the JSON asks for."""
    asked = {path[-1]: path for path in _auto_paths(config)}
    places = {path[-1]: ".".join(path) for path in _FILLERS}
    unused = [
        name
        for name in experiment.auto.model_fields_set
        if name not in asked and getattr(experiment.auto, name) is not None
    ]
    if "warmup_max_lr" in asked and experiment.auto.warmup_max_lr is None:
        unused = [name for name in unused if name != "lr"]
    return [
        f'auto.{name} in the experiment has no effect: the DeepSpeed JSON does not have "{places[name]}": "auto"'
        for name in sorted(unused)
    ]


def _stated(name: str) -> Filler:
    return lambda experiment, config: getattr(experiment.auto, name)


def _warmup_min_lr(experiment: Experiment, config: dict[str, Any]) -> float:
    return experiment.auto.warmup_min_lr or 0.0


def _warmup_max_lr(experiment: Experiment, config: dict[str, Any]) -> Any:
    if experiment.auto.warmup_max_lr is not None:
        return experiment.auto.warmup_max_lr
    optimizer_lr = config.get("optimizer", {}).get("params", {}).get("lr")
    return experiment.auto.lr if optimizer_lr in (None, AUTO) else optimizer_lr


_FILLERS: dict[KeyPath, Filler] = {
    ("gradient_clipping",): _stated("gradient_clipping"),
    **{("optimizer", "params", name): _stated(name) for name in ("lr", "betas", "eps", "weight_decay")},
    ("scheduler", "params", "warmup_min_lr"): _warmup_min_lr,
    ("scheduler", "params", "warmup_max_lr"): _warmup_max_lr,
    ("scheduler", "params", "warmup_num_steps"): _stated("warmup_num_steps"),
    ("scheduler", "params", "total_num_steps"): lambda experiment, config: experiment.run.steps,
}


def fill_auto(config: dict[str, Any], experiment: Experiment, schema: DeepSpeedSchema) -> dict[str, Any]:
    """A copy of the JSON without any ``"auto"``; the batch keys are filled in before.

    ``total_num_steps`` is ``run.steps``, sizes of buckets are left to DeepSpeed's defaults, and values of the
    optimizer, the scheduler and the clipping come from the experiment's ``auto`` block (warm-up starts at 0 and ends
    at ``lr`` unless it says otherwise).

    Raises:
        ConfigError: an ``"auto"`` that nothing stands for, with the line to write; without a source.
    """
    filled = copy.deepcopy(config)
    for path in list(_auto_paths(filled)):
        *parents, key = path
        place = filled
        for parent in parents:
            place = place[parent]
        if path in _LEFT_TO_DEEPSPEED or _is_the_default(path, schema):
            del place[key]
        else:
            place[key] = _value_for(path, experiment, config)
    return filled


def _auto_paths(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if content == AUTO:
        yield path
    elif isinstance(content, dict | list):
        for key, value in content.items() if isinstance(content, dict) else enumerate(content):
            yield from _auto_paths(value, (*path, key))


def _is_the_default(path: KeyPath, schema: DeepSpeedSchema) -> bool:
    section = schema.sections.get(".".join(map(str, path[:-1])))
    return section is not None and section.defaults.get(path[-1]) == AUTO


def _value_for(path: KeyPath, experiment: Experiment, config: dict[str, Any]) -> Any:
    key, name = ".".join(map(str, path)), path[-1]
    if path not in _FILLERS:
        choice = "true or false" if name == "enabled" else "a value"
        raise ConfigError("nothing here stands for it", key=key, value=AUTO, fix=f'write "{name}": {choice}')
    value = _FILLERS[path](experiment, config)
    if value is None:
        example = _EXAMPLES[name]
        raise ConfigError(
            "the experiment has no value for it",
            key=key,
            value=AUTO,
            fix=f'write "{name}": {example} here, or `{name}: {example}` under `auto:` in the experiment',
        )
    return value
