"""Every key of the DeepSpeed JSON is known, and every value has the type that DeepSpeed expects there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError

from dsaccum.config.errors import ConfigError, nearest
from dsaccum.config.schema import DeepSpeedSchema, SectionSchema

AUTO = "auto"
OBSERVERS = (
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
    "flops_profiler",
    "comms_logger",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "steps_per_print",
)
"""They write files, print, or wait for the device; what they observe is no part of an update."""

# What DeepSpeed's own default does not tell: it is None there, or a nested object.
_EXPECTED_TYPES: dict[str, tuple[type, ...]] = {
    "communication_data_type": (str,),
    "gradient_clipping": (),  # has a check of its own, with a better line
    "data_types.grad_accum_dtype": (str,),
    "data_types.param_dtype": (str,),
    "data_types.buffer_dtype": (str,),
    "data_types.keep_in_fp32_modules": (list,),
    "datastates_ckpt": (bool, dict),
    "optimizer.params": (dict,),
    "optimizer.type": (str,),
    "scheduler.params": (dict,),
    "scheduler.type": (str,),
    "steps_per_print": (int,),
    "torch_autocast.dtype": (str,),
    "torch_autocast.lower_precision_safe_modules": (list,),
}
_TYPE_NAMES: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
}


def check_keys(config: Mapping[str, Any], schema: DeepSpeedSchema) -> None:
    """Refuse unknown and removed keys and values of another type, at every level that DeepSpeed describes.

    ``"auto"`` passes here. Parameters of the optimizer and the scheduler are checked with their types.

    Raises:
        ConfigError: the first mistake, without a source.
    """
    for key in config:
        if key in schema.removed:
            raise ConfigError(
                f"was removed from DeepSpeed before {schema.version}, which refuses it", key=key, fix="delete it"
            )
    _check_section("", config, schema.top_level, schema)


def _check_section(path: str, content: Mapping[str, Any], section: SectionSchema, schema: DeepSpeedSchema) -> None:
    for key, value in content.items():
        key_path = f"{path}.{key}" if path else key
        if key not in _known(section):
            raise _unknown_key(key_path, key, section, schema)
        if value == AUTO:
            continue
        nested = schema.sections.get(key_path) or _nested_model(section, key)
        if nested is not None and not (value is None and section.model is not None):
            if not isinstance(value, dict):
                fix = '"zero_optimization": {"stage": 1}' if key_path == "zero_optimization" else None
                raise ConfigError("is no object", key=key_path, value=value, allowed="{...}", fix=fix)
            _check_section(key_path, value, nested, schema)
        elif section.model is not None:
            _check_field(key_path, key, value, section.model)
        else:
            _check_type(key_path, value, section.defaults[key])
    if section.model is not None:
        _check_with_model(path, content, section.model)


def _known(section: SectionSchema) -> set[str]:
    names = section.model.model_fields.keys() if section.model else ()
    return {*section.defaults, *names}


def _unknown_key(key_path: str, key: str, section: SectionSchema, schema: DeepSpeedSchema) -> ConfigError:
    guess = nearest(key, section.defaults)
    where = "here" if "." in key_path else "at the top level"
    elsewhere = [name for name, other in schema.sections.items() if key in other.defaults]
    if guess:
        fix = f'write "{guess}"'
    elif key in schema.top_level.defaults:
        fix = "move it to the top level"
    elif len(elsewhere) == 1:
        fix = f'move it into "{elsewhere[0]}"'
    else:
        fix = "delete it"
    return ConfigError(f"DeepSpeed {schema.version} knows no such key {where}", key=key_path, fix=fix)


def _check_type(key_path: str, value: Any, default: Any) -> None:
    expected = _EXPECTED_TYPES.get(key_path, () if default is None else (type(default),))
    if not expected or any(_is_a(value, kind) for kind in expected):
        return
    allowed = " or ".join(_TYPE_NAMES.get(kind, kind.__name__) for kind in expected)
    fits = unquoted(value, lambda plain: any(_is_a(plain, kind) for kind in expected))
    raise ConfigError("has the wrong type", key=key_path, value=value, allowed=allowed, fix=fits)


def unquoted(value: Any, accepts: Callable[[Any], bool]) -> str | None:
    """The fix for a number or a switch in quotes that would be right without them; None where that's not it."""
    try:
        plain = json.loads(value) if isinstance(value, str) else None
    except json.JSONDecodeError:
        return None
    return f"write {value} without quotes" if plain is not None and accepts(plain) else None


def _is_a(value: Any, kind: type) -> bool:
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    if kind is int:
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return isinstance(value, (int, float) if kind is float else kind)


def _model_of(annotation: Any) -> type[BaseModel] | None:
    for part in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None


def _nested_model(section: SectionSchema, key: str) -> SectionSchema | None:
    for name, field in section.model.model_fields.items() if section.model else ():
        if key in (name, field.alias) and (model := _model_of(field.annotation)) is not None:
            return SectionSchema({field.alias or name: None for name, field in model.model_fields.items()}, model)
    return None


def _check_field(key_path: str, key: str, value: Any, model: type[BaseModel]) -> None:
    """Strictly by the field's own type: DeepSpeed itself would take "true" for true and "5" for 5."""
    [field] = [field for name, field in model.model_fields.items() if key in (name, field.alias)]
    try:
        TypeAdapter[Any](field.annotation or Any).validate_json(json.dumps(_whole(value)), strict=True)
    except PydanticSchemaGenerationError:
        return  # a type that only Python code can make; no JSON value would do
    except ValidationError as error:
        raise ConfigError("is not possible here", key=key_path, value=value, allowed=_allowed(error)) from None


def _check_with_model(path: str, content: Mapping[str, Any], model: type[BaseModel]) -> None:
    """DeepSpeed's own rules: ranges, and what does not go together inside one section."""
    stated = {key: value for key, value in content.items() if value != AUTO}
    try:
        model(**stated)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join([path, *map(str, problem["loc"])])
        message = problem["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        value = {} if isinstance(problem["input"], dict) else {"value": problem["input"]}
        message = message.removeprefix("Input should be ")
        raise ConfigError("is refused by DeepSpeed", key=key, allowed=message, **value) from None
    except TypeError as error:
        raise ConfigError("is refused by DeepSpeed", key=path, allowed=str(error)) from None


def _whole(value: Any) -> Any:
    # 5e8 is how people write bucket sizes, and JSON makes a float of it.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _allowed(error: ValidationError) -> str:
    messages = [problem["msg"].removeprefix("Input should be ") for problem in error.errors()]
    # An enum's members may have several names for one value: 0, 1, 2, 3 or 3.
    choices = dict.fromkeys(choice for message in messages for choice in re.split(r", | or ", message))
    return " or ".join(choices).replace("a valid boolean", "true or false").replace("valid ", "")
