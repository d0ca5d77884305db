"""Reading the two files strictly: what cannot mean one thing is refused, in one line with its line number."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from dsaccum.config.errors import ConfigError, located_in, nearest

_YAML_FIXES = {
    "'\\t'": "indent with spaces",
    "another document": "delete the line ---",
    "constructor for the tag": "delete the tag: a config holds data only",
    "expected ',' or": "close the bracket",
}


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file: no comments, no trailing commas, no NaN, no key twice.

    Raises:
        ConfigError: the file cannot be read, is no strict JSON, or holds no object.
    """
    with located_in(path):
        text = _read_text(path)
        try:
            content = json.loads(
                text,
                object_pairs_hook=_unique,
                parse_constant=lambda name: _refuse_number(text, name),
                parse_float=lambda number: _finite_float(text, number),
            )
        except json.JSONDecodeError as error:
            raise ConfigError(_json_problem(text, error)) from None
        except ConfigError:
            raise
        except ValueError as error:  # a number of thousands of digits
            raise ConfigError(f"is no JSON that can be read: {error}") from None
        except RecursionError:
            raise ConfigError("is nested too deeply") from None
        if not isinstance(content, dict):
            raise ConfigError(f"must hold a JSON object, not {_json_kind(content)}", fix="start the file with {")
        return content


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, parsed as data only: no Python objects, no key twice.

    Raises:
        ConfigError: the file cannot be read, is no YAML, or holds no mapping.
    """
    with located_in(path):
        content = parse_yaml(_read_text(path))
        if not isinstance(content, dict):
            raise ConfigError("must hold fields as `name: value` lines", fix="start the file with `name: my-run`")
        return content


def parse_yaml(text: str) -> Any:
    """The value of a YAML text; ``1e-4`` is a number here, as in YAML 1.2, not the text of YAML 1.1."""
    loader: _StrictLoader | None = None
    try:
        loader = _StrictLoader(text)  # refuses control characters at once
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        problem = str(error.problem or error.context)
        fix = next((fix for part, fix in _YAML_FIXES.items() if part in problem), "put it in quotes")
        raise ConfigError(f"{line}is no YAML: {problem}", fix=fix) from None
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"is no YAML: {error}", fix="put it in quotes") from None
    except RecursionError:
        raise ConfigError("is nested too deeply") from None
    finally:
        if loader is not None:
            loader.dispose()


def _read_text(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError("there is no such file", fix=_nearest_file(path)) from None
    except IsADirectoryError:
        raise ConfigError("is a directory, not a file", fix="name a file in it") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8 text (byte {error.start})", fix="save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError("is no file name") from None
    if "\0" in text:
        raise ConfigError("is a binary file, not text", fix="name another file")
    if not text.strip():
        raise ConfigError("is empty", fix="name another file")
    return text


def _nearest_file(path: Path) -> str | None:
    """One of that ending beside it that was most likely meant."""
    with contextlib.suppress(OSError):
        guess = nearest(path.name, [other.name for other in path.parent.glob(f"*{path.suffix}")])
        return str(path.with_name(guess)) if guess else None
    return None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ConfigError("stands twice, and only one of the two would count", key=key, fix="keep one of them")
        content[key] = value
    return content


def _refuse_number(text: str, number: str) -> float:
    found = re.search(rf"[:,\[]\s*{re.escape(number)}", text)
    line = f"line {text.count(chr(10), 0, found.end()) + 1}: " if found else ""
    raise ConfigError(f"{line}{number} is no finite number", fix="write a finite number")


def _finite_float(text: str, number: str) -> float:
    value = float(number)
    return value if math.isfinite(value) else _refuse_number(text, number)


def _json_problem(text: str, error: json.JSONDecodeError) -> str:
    rest, before = text[error.pos :].lstrip(), text[: error.pos].rstrip()
    if rest.startswith(("//", "#", "/*")):
        reason = "a comment, and JSON has none; fix: delete it"
    elif before.endswith(",") and rest.startswith(("}", "]")):
        reason = "a comma before the closing bracket; fix: delete the comma"
    elif rest.startswith("'"):
        reason = 'single quotes; fix: write "..."'
    else:
        reason = f"is no JSON: {error.msg}; fix: mend it there"
    return f"line {error.lineno}, column {error.colno}: {reason}"


def _json_kind(value: Any) -> str:
    names = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice and reads ``1e-4`` as a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise ConfigError(
                    f"line {key_node.start_mark.line + 1}: stands twice, and only one of the two would count",
                    key=str(key),
                    fix="keep one of them",
                )
            if isinstance(key, Hashable):
                seen.add(key)
        return super().construct_mapping(node, deep)


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)
