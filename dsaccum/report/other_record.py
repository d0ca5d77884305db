"""A record of a schema that has no page made for it: shown key by key."""

from __future__ import annotations

from typing import Any

from pydantic import AliasChoices, ConfigDict, Field

from dsaccum.records import Number, Record

_BESIDES = {"schema_name", "verdict", "versions", "hardware", "command", "elapsed_s"}


class OtherRecord(Record):
    """Whatever keys it has are kept; those that every record has are known."""

    model_config = ConfigDict(frozen=True, extra="allow")

    schema_name: str = Field(
        validation_alias=AliasChoices("schema", "schema_name"),
        serialization_alias="schema",
    )
    verdict: str | None = None
    versions: dict[str, str | None] = Field(default_factory=dict)
    hardware: dict[str, Any] = Field(default_factory=dict)
    command: list[str] = Field(default_factory=list)
    elapsed_s: Number = None

    @property
    def kind(self) -> str:
        """``dsaccum doctor``."""
        return self.schema_name.partition("/")[0].replace(".", " ")

    def values(self) -> dict[str, Any]:
        """Numbers, words and the like, by key."""
        return {key: value for key, value in self._found().items() if not isinstance(value, dict | list)}

    def tables(self) -> dict[str, tuple[list[str], list[dict[str, Any]]]]:
        """Lists of flat objects: their columns and rows, by key."""
        return {
            key: (list(dict.fromkeys(column for row in value for column in row)), value)
            for key, value in self._found().items()
            if _is_table(value)
        }

    def rest(self) -> dict[str, Any]:
        """What is neither."""
        shown = {*self.values(), *self.tables()}
        return {key: value for key, value in self._found().items() if key not in shown and value}

    def _found(self) -> dict[str, Any]:
        return {key: value for key, value in self.model_dump(mode="json").items() if key not in _BESIDES}


def _is_table(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(row, dict) and not any(isinstance(cell, dict | list) for cell in row.values()) for row in value
        )
    )
