"""Every bad or treacherous input gives one line of ours, or the right warning, and changes nothing on disk.

The inputs are data: ``bad/deepspeed`` and ``bad/experiment``, with what must be said in the table beside each folder.
Run with ``pytest tests/configs/inputs``. Not covered: exit codes, data and run directories (tested end to end).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsaccum.config.deepspeed import load_deepspeed_config
from dsaccum.config.errors import ConfigError
from dsaccum.config.loading import load_experiment

BAD = Path(__file__).parent / "bad"
REMEDIES = ("fix: ", "allowed: ", "nearest: ", "; write ", "; add ")


def table(name: str) -> list[Any]:
    cases = yaml.safe_load((BAD / f"{name}.yaml").read_text())
    return [pytest.param(case, id=f"{case['file']}{case.get('set', '')}") for case in cases]


@pytest.fixture(autouse=True)
def nothing_changes_on_disk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = {path: hashlib.sha256(path.read_bytes()).digest() for path in BAD.rglob("*") if path.is_file()}
    yield
    assert {path: hashlib.sha256(path.read_bytes()).digest() for path in BAD.rglob("*") if path.is_file()} == before
    assert list(tmp_path.iterdir()) == []


def assert_one_helpful_line(message: str, source: str, case: dict[str, Any]) -> None:
    assert "\n" not in message
    assert message.startswith(f"{source}: ")
    assert any(remedy in message for remedy in REMEDIES), message
    for part in case["says"]:
        assert part in message, message


@pytest.mark.parametrize("case", table("deepspeed"))
def test_deepspeed_json_gives_one_line_or_the_warning(case, schema_on, bare_experiment):
    path = BAD / "deepspeed" / case["file"]
    arguments = {
        "schema": schema_on(**case.get("machine", {})),
        "experiment": bare_experiment,
        "world_size": case.get("world_size", 1),
        **case.get("flags", {}),
    }
    if "warns" in case:
        warnings = load_deepspeed_config(path, **arguments).warnings
        assert any(case["warns"] in warning for warning in warnings), warnings
        assert all("\n" not in warning for warning in warnings)
        return
    with pytest.raises(ConfigError) as caught:
        load_deepspeed_config(path, **arguments)
    assert_one_helpful_line(str(caught.value), case.get("source", str(path)), case)


@pytest.mark.parametrize("case", table("experiment"))
def test_experiment_yaml_gives_one_line(case):
    path = BAD / "experiment" / case["file"]
    with pytest.raises(ConfigError) as caught:
        load_experiment(path, case.get("set", []))
    assert_one_helpful_line(str(caught.value), case.get("source", str(path)), case)


def test_every_input_file_stands_in_its_table():
    for name in ("deepspeed", "experiment"):
        listed = {case["file"] for case in yaml.safe_load((BAD / f"{name}.yaml").read_text())}
        assert listed == {path.name for path in (BAD / name).iterdir()}


def test_sound_relatives_of_the_bad_inputs_are_taken(schema_on, bare_experiment):
    """The control: what the bad files were made from has neither an error nor a warning."""
    experiment = load_experiment(BAD / "experiment" / "sound.yaml", ["run.steps=7"])
    assert experiment.run.steps == 7
    path = BAD / "deepspeed" / "flag-not-positive.json"
    settings = load_deepspeed_config(path, schema=schema_on(), experiment=bare_experiment, world_size=2)
    assert (settings.batch.total, settings.warnings) == (32, [])


@pytest.mark.parametrize(("name", "says"), [("absent.file", "no such file"), (".", "is a directory")])
def test_a_path_that_is_no_file_gives_one_line(name, says, schema_on, bare_experiment):
    with pytest.raises(ConfigError, match=says):
        load_experiment(name)
    with pytest.raises(ConfigError, match=says):
        load_deepspeed_config(name, schema=schema_on(), experiment=bare_experiment, world_size=1)
