"""Strict reading of JSON and YAML. Run with ``pytest tests/config``; whole inputs are in tests/configs/inputs."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsaccum.config.errors import ConfigError, located_in, nearest
from dsaccum.config.reading import parse_yaml, read_json_object, read_yaml_mapping


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "+1e-4", "1.e-4", "1.0e-4", "0.0001"])
def test_numbers_with_an_exponent_are_numbers_in_yaml(text):
    assert parse_yaml(text) == 1e-4


@pytest.mark.parametrize("text", ["1e", "e5", "1e-4x", "v1e4"])
def test_what_only_looks_like_an_exponent_stays_text(text):
    assert parse_yaml(text) == text


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3)))
def test_strict_json_reads_what_json_writes(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("json") / "any.json"
    path.write_text(json.dumps({"value": value}))
    assert read_json_object(path) == {"value": value}


def test_merge_keys_of_yaml_may_repeat_what_they_override():
    assert parse_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}")["b"] == {"x": 3, "y": 2}


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbfname: demo\n")
    assert read_yaml_mapping(path) == {"name": "demo"}


def test_errors_are_one_line_and_located_once():
    with pytest.raises(ConfigError) as caught, located_in("outer"), located_in("inner"):
        raise ConfigError("is\nwrong", key="a.b", value={"long": "x" * 200}, allowed="this", fix="do\nthat")
    message = str(caught.value)
    assert message.startswith('inner: a.b = {"long": "xxx')
    assert message.endswith("...: is wrong; allowed: this; fix: do that")


def test_nearest_finds_slips_and_leaves_strangers_alone():
    known = ["gradient_accumulation_steps", "gradient_clipping", "bf16"]
    assert nearest("gradient_accumulation_step", known) == "gradient_accumulation_steps"
    assert nearest("bfloat16", known) == "bf16"
    assert nearest("unrelated", known) is None
