"""JSON schemas of the config and the records, for editors and for readers of `record.json`.

Written to docs/schemas by docs/generate.py, and printed by `scaleray config schema`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from scaleray.common.options import meanings_of
from scaleray.config.run import RunConfig
from scaleray.records.live_state import LiveState
from scaleray.records.run_record import RunRecord
from scaleray.records.study_record import StudyRecord
from scaleray.records.sweep_record import SweepRecord

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def _schema_of_config() -> dict[str, Any]:
    """Schema of a config file. An empty section means its defaults."""
    schema = RunConfig.model_json_schema()
    for name, section in schema["properties"].items():
        if "$ref" in section and name not in schema["required"]:
            described = schema["$defs"][section["$ref"].rpartition("/")[2]].get("description", "")
            schema["properties"][name] = {
                "anyOf": [{"$ref": section["$ref"]}, {"type": "null"}],
                "description": described,
            }
    return _tidy({"$schema": DIALECT, "title": "Config of scaleray", **schema})


def record_schema(kind: type) -> dict[str, Any]:
    """Schema of a record.json, in which null represents numbers that were not finite."""
    schema = TypeAdapter(kind).json_schema(schema_generator=_OfRecords)
    return _tidy({"$schema": DIALECT, "title": kind.__name__, **schema})


SCHEMAS: dict[str, Callable[[], dict[str, Any]]] = {
    "config": _schema_of_config,
    "run": lambda: record_schema(RunRecord),
    "study": lambda: record_schema(StudyRecord),
    "sweep": lambda: record_schema(SweepRecord),
    "live": lambda: record_schema(LiveState),
}
"""All schemas by name."""


class _OfRecords(GenerateJsonSchema):
    """Generates schemas of records as they are written: with each field's docstring, and numbers that may be null."""

    def float_schema(self, schema: core_schema.FloatSchema) -> JsonSchemaValue:
        return {"type": ["number", "null"]}

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        inner = self.generate_inner(schema["schema"])
        return inner if "null" in inner.get("type", ()) else super().nullable_schema(schema)

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> JsonSchemaValue:
        found = super().dataclass_schema(schema)
        for base in schema["cls"].__mro__:
            for name, words in _field_words(base).items():
                if name in found["properties"]:
                    found["properties"][name].setdefault("description", words)
        return found


def _field_words(kind: type) -> dict[str, str]:
    """Docstring of each field of a class, by the field's name."""
    try:
        return meanings_of(inspect.getsource(kind))
    except (OSError, TypeError):  # for classes of the interpreter itself
        return {}


def _tidy(schema: Any, *, holds_names: bool = False) -> Any:
    """Remove pydantic's titles, which only repeat the names, and put each description on one line. holds_names: whether
    the keys are names in a mapping of schemas, of which one may be `title`."""
    if isinstance(schema, list):
        return [_tidy(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    tidy = {}
    for key, value in schema.items():
        if key == "title" and not holds_names and "$schema" not in schema:
            continue
        if key == "description" and isinstance(value, str):
            tidy[key] = " ".join(value.split())
        else:
            tidy[key] = value if key == "default" else _tidy(value, holds_names=key in ("properties", "$defs"))
    return tidy


def config_schema(what: Literal["config", "run", "study", "sweep", "live"] = "config") -> dict[str, Any]:
    """Return the JSON schema of the config, of the record.json of a run, study or sweep, or of a line of `scaleray
    watch --json`."""
    return dict(SCHEMAS[what]())
