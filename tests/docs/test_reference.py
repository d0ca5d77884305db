"""The tables of the documents say what the code says: fields, types, defaults, flags, rules, files, exit codes.

Run: pytest tests/docs/test_reference.py. Not covered: the sentences around the tables.
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from annotated_types import Ge, Gt, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dsaccum.config import advice, auto, combinations
from dsaccum.config.deepspeed import load_deepspeed_config
from dsaccum.config.experiment import AutoConfig, DataConfig, Experiment, LossConfig, ModelConfig, RunConfig
from dsaccum.config.schema import Machine
from dsaccum.engine.schema import installed_schema
from dsaccum.training import loop
from dsaccum.training.arguments import parse_arguments
from dsaccum.training.metrics import StepMetrics
from dsaccum.training.opening import data_warnings
from dsaccum.training.outcome import ExitCode
from tests.docs.markdown import REFERENCE, REPOSITORY, code, section, tables

README, FAILURES = REPOSITORY / "README.md", REPOSITORY / "docs/failures.md"
SECTIONS: dict[str, type[BaseModel]] = {
    "Top level": Experiment,
    "model": ModelConfig,
    "data": DataConfig,
    "loss": LossConfig,
    "auto": AutoConfig,
    "run": RunConfig,
}


def default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if isinstance(value, BaseModel):
        return "see below"
    if value is None:
        return "none"
    assert value is not PydanticUndefined
    text = value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else json.dumps(value)
    return f"`{text}`"


def type_of(field: FieldInfo) -> str:
    is_union = typing.get_origin(field.annotation) in (typing.Union, types.UnionType)
    parts = typing.get_args(field.annotation) if is_union else (field.annotation,)
    [annotation] = [part for part in parts if part is not type(None)]
    metadata = list(field.metadata)
    if typing.get_origin(annotation) is typing.Annotated:
        annotation, *inner = typing.get_args(annotation)
        metadata += inner
    for constraint in [each for each in metadata if isinstance(each, FieldInfo)]:
        metadata += constraint.metadata
    return _in_words(annotation, metadata)


def _in_words(annotation: Any, metadata: list[Any]) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        *others, last = (f"`{choice}`" for choice in typing.get_args(annotation))
        return f"{', '.join(others)} or {last}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    if typing.get_origin(annotation) is list:
        if any(isinstance(each, MinLen) for each in metadata):
            return "two numbers from 0 to below 1"
        return "list of texts"
    validators = {each.func.__name__ for each in metadata if hasattr(each, "func")}
    if "_names_a_function" in validators:
        return "`FILE.py:function`"
    if "_is_a_file_name" in validators:
        return "file name"
    plain = {bool: "true or false", str: "text", int: "whole number", float: "number"}
    text = plain.get(annotation, "name: value pairs")
    for each in metadata:
        assert not isinstance(each, Lt), "no words for it yet"
        text += f", {each.ge} or more" if isinstance(each, Ge) else f" above {each.gt}" if isinstance(each, Gt) else ""
    return text


@pytest.mark.parametrize("name", SECTIONS)
def test_fields_types_and_defaults(name: str) -> None:
    fields = SECTIONS[name].model_fields
    [table] = tables(section(REFERENCE, name))
    found = {code(field)[0]: (kind, default) for field, kind, default, _ in table}
    assert found == {key: (type_of(field), default_of(field)) for key, field in fields.items()}
    assert all(len(row[3]) > 10 for row in table), "each field has a meaning"


def test_every_section_is_in_the_reference() -> None:
    nested = {field.annotation for field in Experiment.model_fields.values()} & set(SECTIONS.values())
    models = {field.annotation for field in Experiment.model_fields.values() if "Config" in str(field.annotation)}
    assert models == nested


def test_flags_are_those_of_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--help"], Path("x.yaml"))
    shown = re.findall(r"^  (?:-h, )?(--[a-z-]+)", capsys.readouterr().out, flags=re.MULTILINE)
    [table] = tables(section(REFERENCE, "The flags of launch/train.py"))
    assert sorted([code(flag)[0] for flag, *_ in table] + ["--help"]) == sorted(shown)


def test_refused_keys_are_those_of_the_code() -> None:
    table = tables(section(REFERENCE, "Refused"))[0]
    words = {"_is_on": "on", "_is_off": "off", "_is_present": "present", "_is_several": "above 1", "_is_sum": '`"sum"`'}
    words |= {"_is_false": "`false`", "_is_no_divisor": "0 or less"}
    found = {code(key)[0]: when for key, when, _ in table}
    assert found == {key: words[refuses.__name__] for key, refuses, *_ in combinations._REFUSED}


def test_gpu_only_keys_and_optimizers_are_named() -> None:
    text = section(REFERENCE, "Refused")
    for key in combinations._GPU_ONLY_KEYS:
        assert f"`{key.removeprefix('zero_optimization.')}`" in text


def test_auto_values_are_those_of_the_code() -> None:
    [table] = tables(section(REFERENCE, "Auto values"))
    listed = {word.rpartition(".")[2] for where, _ in table for word in code(where)}
    for path in [*auto._FILLERS, *auto._LEFT_TO_DEEPSPEED]:
        assert path[-1] in listed


def test_warnings_are_worded_as_they_come() -> None:
    inputs = REPOSITORY / "tests/configs/inputs/bad"
    experiment = Experiment(name="x", model=ModelConfig(architecture="gpt2"), run=RunConfig(steps=100))
    machine = Machine(device="cpu", has_compiler=True, supports_fp16=False)
    schema = dataclasses.replace(installed_schema(), machine=machine)
    said = [f"{key} {reason}" for key, reason in advice._WITHOUT_EFFECT.items()]
    for case in yaml.safe_load((inputs / "deepspeed.yaml").read_text()):
        if "warns" in case:
            said += load_deepspeed_config(
                inputs / "deepspeed" / case["file"], schema=schema, experiment=experiment, world_size=1,
                **case.get("flags", {}),
            ).warnings  # fmt: skip
    few_samples = SimpleNamespace(
        data=SimpleNamespace(samples=range(10)),
        deepspeed=SimpleNamespace(batch=SimpleNamespace(total=16)),
        experiment=SimpleNamespace(data=DataConfig()),
    )
    said += [*data_warnings(few_samples), loop._describe_decay(["..."])]
    [table] = tables(section(REFERENCE, "Warned of"))
    for warning, _ in table:
        assert any(code(warning)[0] in line for line in said), warning


def test_exit_codes() -> None:
    for document in (README, FAILURES):
        [table] = tables(section(document, "Exit codes"))
        assert [int(number) for number, _ in table] == [code.value for code in ExitCode]


def test_metrics_fields() -> None:
    found = [code(name)[0] for name, *_ in tables(section(README, "What a run leaves behind"))[1]]
    assert found == [field.name for field in dataclasses.fields(StepMetrics)]


def test_shipped_configs_are_listed_with_their_figures() -> None:
    [table] = tables(section(README, "Shipped: how to step"))
    found = {re.search(r"\((.+)\)", name)[1]: tuple(figures) for name, *figures, _ in table}
    expected = {}
    for path in (REPOSITORY / "ds_configs").glob("*.json"):
        config = json.loads(path.read_text())
        precision = "bf16" if "bf16" in config else "bf16 autocast" if "torch_autocast" in config else "fp32"
        batch = (config["gradient_accumulation_steps"], config["train_micro_batch_size_per_gpu"])
        expected[f"ds_configs/{path.name}"] = (*map(str, batch), precision, str(config["zero_optimization"]["stage"]))
    assert found == expected


def test_shipped_experiments_are_listed() -> None:
    [table] = tables(section(README, "Shipped: what to train"))
    assert {re.search(r"\((.+)\)", name)[1] for name, *_ in table} == {
        f"launch/experiments/{path.name}" for path in (REPOSITORY / "launch/experiments").glob("*.yaml")
    }


def test_the_two_commands_open_the_readme() -> None:
    opening = README.read_text(encoding="utf-8").split("## ")[0].splitlines()
    assert "pip install -c constraints.txt . && deepspeed launch/train.py --deepspeed ds_configs/accum4.json" in opening
    assert "pip install -c constraints.txt '.[test]' && pytest" in opening


def test_a_missing_field_would_be_noticed() -> None:
    """Control: the comparison fails when the table lacks a row or has another default."""
    text = section(REFERENCE, "run").replace("| `10` |", "| `11` |")
    rows = tables(text)[0]
    assert {code(row[0])[0]: row[2] for row in rows}["max_skipped"] == "`11`"
    assert default_of(RunConfig.model_fields["max_skipped"]) == "`10`"
