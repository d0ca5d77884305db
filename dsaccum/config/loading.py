"""From a YAML file and ``--set`` flags to an ``Experiment``, or to one line that says what to mend."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dsaccum.config.errors import ConfigError, located_in, nearest
from dsaccum.config.experiment import Experiment
from dsaccum.config.reading import parse_yaml, read_yaml_mapping

KeyPath = tuple[str, ...]

_TYPE_NAMES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a text",
    "list_type": "a list",
    "dict_type": "name: value pairs",
    "model_type": "name: value pairs",
    "model_attributes_type": "name: value pairs",
}
_RANGES = {
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "less than {lt}",
    "too_short": "{min_length} items",
    "too_long": "{max_length} items",
}


def load_experiment(path: str | Path, overrides: Sequence[str] = ()) -> Experiment:
    """Read an experiment YAML and apply ``--set section.key=value`` overrides to it, in their order.

    Args:
        path: the YAML file.
        overrides: ``section.key=value`` each; the value is parsed as YAML.

    Raises:
        ConfigError: the first mistake, with how many more there are. Its source is the file, or the flag
            ``--set`` where an override brought the mistake in.
    """
    path = Path(path)
    written = read_yaml_mapping(path)
    content = copy.deepcopy(written)
    overridden = [_apply_override(content, override) for override in overrides]
    try:
        return _validated(content)
    except ConfigError as mistake:
        from_flag = any(_overlap(mistake.key, key_path) for key_path in overridden) or _is_sound(written)
        raise mistake.located("--set" if from_flag else path) from None


def experiment_of(content: Mapping[str, Any], source: str | Path) -> Experiment:
    """An experiment that a record has kept.

    Args:
        content: as it was resolved.
        source: the record's file, for messages.

    Raises:
        ConfigError: the first mistake; another version wrote it, say.
    """
    with located_in(source):
        return _validated(content)


def _validated(content: Mapping[str, Any]) -> Experiment:
    try:
        return Experiment.model_validate(content)
    except ValidationError as error:
        problems = error.errors()
        raise _as_config_error(problems[0], more=len(problems) - 1) from None


@contextmanager
def overrides_named(overrides: Sequence[str]) -> Iterator[None]:
    """Inside, a mistake in a field that ``--set`` has set names that flag, not the file that never held it."""
    try:
        yield
    except ConfigError as error:
        keys = [tuple(override.partition("=")[0].strip().split(".")) for override in overrides]
        if not any(_overlap(error.key, key) for key in keys):
            raise
        raise error.moved_to("--set") from None


def _apply_override(content: dict[str, Any], override: str) -> KeyPath:
    name, equals, text = override.partition("=")
    key_path = tuple(name.strip().split("."))
    with located_in("--set"):
        if not equals or not all(key_path):
            raise ConfigError("is no override", value=override, allowed="section.key=value", fix="--set run.steps=10")
        *sections, key = key_path
        place = content
        for depth, section in enumerate(sections):
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ConfigError("has no fields", key=".".join(sections[: depth + 1]), fix="set it as a whole")
        try:
            place[key] = parse_yaml(text)
        except ConfigError as error:
            raise ConfigError(error.problem, key=name, fix=error.fix) from None
    return key_path


def _is_sound(content: dict[str, Any]) -> bool:
    try:
        Experiment.model_validate(content)
    except ValidationError:
        return False
    return True


def _overlap(key: str | None, key_path: KeyPath) -> bool:
    mistaken = tuple(key.split(".")) if key else ()
    shared = min(len(mistaken), len(key_path))
    return shared > 0 and mistaken[:shared] == key_path[:shared]


def _as_config_error(problem: ErrorDetails, more: int) -> ConfigError:
    """One pydantic problem in our words, with what may stand there instead."""
    key = ".".join(str(part) for part in problem["loc"])
    others = f" (and {more} more)" if more else ""
    original = problem.get("ctx", {}).get("error")
    if isinstance(original, ConfigError):
        value = {} if original.key else {"value": problem["input"]}
        return ConfigError(
            original.problem + others,
            key=original.key or key,
            allowed=original.allowed,
            fix=original.fix,
            **value,
        )
    match problem["type"]:
        case "missing":
            return ConfigError(f"is missing{others}", key=key, fix=f"write `{problem['loc'][-1]}: ...`")
        case "extra_forbidden":
            return _unknown_field(problem, key, others)
        case "literal_error":
            return ConfigError(
                f"is not possible{others}", key=key, value=problem["input"], allowed=problem["ctx"]["expected"]
            )
        case kind if kind in _RANGES:
            allowed = _RANGES[kind].format(**problem["ctx"])
            return ConfigError(f"is out of range{others}", key=key, value=problem["input"], allowed=allowed)
        case kind if kind in _TYPE_NAMES:
            allowed = _TYPE_NAMES[kind]
            return ConfigError(f"has the wrong type{others}", key=key, value=problem["input"], allowed=allowed)
        case _:
            message = problem["msg"].removeprefix("Value error, ").replace("Input should", "Must")
            return ConfigError(f"{message[0].lower()}{message[1:]}{others}", key=key, value=problem["input"])


def _unknown_field(problem: ErrorDetails, key: str, others: str) -> ConfigError:
    if key == "data.streaming":
        reason = "is refused: samples are read in a seeded order, which needs random access"
        return ConfigError(reason, key=key, value=problem["input"], fix="delete it; the data set is downloaded once")
    *parents, name = problem["loc"]
    known = _fields_at(Experiment, parents)
    guess = nearest(str(name), known)
    fix = f"write {'.'.join([*map(str, parents), guess])}" if guess else "delete it"
    return ConfigError(f"is no known field{others}", key=key, allowed=None if guess else ", ".join(known), fix=fix)


def _fields_at(model: type[BaseModel], parents: Sequence[int | str]) -> Mapping[str, Any]:
    for parent in parents:
        annotation = model.model_fields[str(parent)].annotation
        model = next(part for part in (annotation, *get_args(annotation)) if _is_model(part))
    return model.model_fields


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
