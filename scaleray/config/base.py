"""Base of every config section: frozen pydantic models that reject unknown keys and imprecise types."""

from __future__ import annotations

import math
import re
import types
import typing
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import core_schema

LARGEST_COUNT = 2**40  # anything larger is a mistake, and would overflow the planner's 64-bit arithmetic

Unit = Literal["steps", "epochs", "samples", "tokens"]
UNITS: tuple[str, ...] = ("steps", "epochs", "samples", "tokens")


class Settings(BaseModel):
    """Base of all sections: frozen, unknown keys rejected, only finite numbers, true/false never read as a number."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, validate_default=True
    )

    @model_validator(mode="before")
    @classmethod
    def _no_nul_in_text(cls, values: Any) -> Any:
        """Reject NUL characters: no path, address or name can contain one, and later errors about it are unclear."""
        if isinstance(values, dict):
            for name, value in values.items():
                info = cls.model_fields.get(name)
                is_section = (
                    info is not None and isinstance(info.annotation, type) and issubclass(info.annotation, Settings)
                )
                if not is_section and _holds_nul(value):  # a section checks itself, and reports its key
                    raise ValueError(f"{name}: it contains a NUL character")
        return values

    @model_validator(mode="before")
    @classmethod
    def _no_booleans_for_numbers(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for name, value in values.items():
                info = cls.model_fields.get(name)
                items = value if isinstance(value, (list, tuple)) else [value]
                has_boolean = any(isinstance(item, bool) for item in items)
                if has_boolean and info is not None and bool not in _leaf_types(info.annotation):
                    raise ValueError(f"{name}: a true/false value is not allowed here")
        return values


def _holds_nul(value: Any) -> bool:
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str) and "\0" in item:
            return True
        if isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set)):
            waiting += item
    return False


def _leaf_types(annotation: Any) -> set[Any]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return set().union(*(_leaf_types(a) for a in typing.get_args(annotation)))
    if typing.get_origin(annotation) is Annotated:
        return _leaf_types(typing.get_args(annotation)[0])
    return {annotation}


@dataclass(frozen=True)
class Duration:
    """Length of a training: a number and a unit (steps, epochs, samples or tokens). Written `3 epochs` or `1.5e6
    samples`."""

    value: float
    unit: str

    def __str__(self) -> str:
        return self.stored().removesuffix("s") if self.value == 1 else self.stored()

    def stored(self) -> str:
        """Text for records, always in the plural as in older records."""
        value = float(self.value)
        return f"{int(value) if value.is_integer() else repr(value)} {self.unit}"

    @classmethod
    def parse(cls, text: Any) -> Duration:
        """Parse text such as `3 epochs`. Raises ValueError with the allowed form."""
        if isinstance(text, Duration):
            return text
        match = (
            re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([a-z]+)\s*", text)
            if isinstance(text, str)
            else None
        )
        unit = match.group(2) if match else ""
        unit = unit if unit.endswith("s") else unit + "s"
        if match is None or unit not in UNITS:
            raise ValueError(
                f"a number and one of {', '.join(UNITS)} are needed, for example '3 epochs' or '500 steps'"
            )
        value = float(match.group(1).replace("_", ""))
        if not value <= LARGEST_COUNT:
            raise ValueError(f"it must be at most {LARGEST_COUNT} {unit}")
        return cls(value, unit)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.plain_serializer_function_ser_schema(cls.stored)
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        number, unit = r"[0-9][0-9_]*(\.[0-9]*)?([eE][+-]?[0-9]+)?", "|".join(f"{unit}|{unit[:-1]}" for unit in UNITS)
        return {"type": "string", "pattern": rf"^\s*{number}\s*({unit})\s*$", "examples": ["3 epochs", "500 steps"]}


def above_zero(duration: Duration | None) -> Duration | None:
    """Field validator for durations that must not be zero."""
    if duration is not None and duration.value <= 0:
        raise ValueError("it must be above 0")
    return duration


@dataclass(frozen=True)
class Target:
    """Metric value at which training may stop. Written `val/accuracy >= 0.97`."""

    metric: str
    comparison: str
    value: float

    def __str__(self) -> str:
        return f"{self.metric} {self.comparison} {self.value!r}"

    def is_reached(self, metrics: dict[str, float]) -> bool:
        """Whether the last evaluation reached the target; False for a metric that was not evaluated."""
        value = metrics.get(self.metric)
        if value is None:
            return False
        return value >= self.value if self.comparison == ">=" else value <= self.value

    @classmethod
    def parse(cls, text: Any) -> Target:
        """Parse text such as `val/accuracy >= 0.97`. Raises ValueError with the allowed form."""
        if isinstance(text, Target):
            return text
        match = (
            re.fullmatch(r"\s*([\w.-]+/[\w./-]+)\s*(>=|<=)\s*([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*", text)
            if isinstance(text, str)
            else None
        )
        if match is None:
            raise ValueError("a metric, >= or <=, and a number are needed, for example 'val/accuracy >= 0.97'")
        value = float(match.group(3))
        if not math.isfinite(value):
            raise ValueError("the number must be finite")
        return cls(match.group(1), match.group(2), value)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        pattern = r"^\s*[\w.-]+/[\w./-]+\s*(>=|<=)\s*[-+]?[0-9.]+([eE][-+]?[0-9]+)?\s*$"
        return {"type": "string", "pattern": pattern, "examples": ["val/accuracy >= 0.97"]}


@dataclass(frozen=True)
class WorkerRange:
    """Number of workers that may change during a run. Written `{min: 1, max: 4}` or `1..4`."""

    min: int
    max: int

    def __str__(self) -> str:
        return f"{self.min}..{self.max}"

    @classmethod
    def parse(cls, value: Any) -> WorkerRange:
        """Parse `{min: 1, max: 4}` or `1..4`. Raises ValueError with the allowed form."""
        if isinstance(value, WorkerRange):
            return value
        if isinstance(value, str) and (match := re.fullmatch(r"\s*([0-9]{1,6})\s*\.\.\s*([0-9]{1,6})\s*", value)):
            value = {"min": int(match.group(1)), "max": int(match.group(2))}
        if (
            not isinstance(value, dict)
            or value.keys() != {"min", "max"}
            or not all(isinstance(v, int) and not isinstance(v, bool) for v in value.values())
        ):
            raise ValueError("it must be a whole number, or a range such as {min: 1, max: 4}")
        if not 1 <= value["min"] <= value["max"] <= 100_000:
            raise ValueError("min must be at least 1, and max at least min")
        return cls(value["min"], value["max"])

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse,
            serialization=core_schema.plain_serializer_function_ser_schema(lambda r: {"min": r.min, "max": r.max}),
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        end = {"type": "integer", "minimum": 1, "maximum": 100_000}
        mapping = {"type": "object", "properties": {"min": end, "max": end}, "required": ["min", "max"]}
        text = {"type": "string", "pattern": r"^\s*[0-9]{1,6}\s*\.\.\s*[0-9]{1,6}\s*$", "examples": ["1..4"]}
        return {"anyOf": [{**mapping, "additionalProperties": False}, text]}


def _whole(value: Any) -> Any:
    """Accept text such as `1e5` as a whole number, since YAML reads it as text."""
    if not isinstance(value, str):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    return int(number) if number.is_integer() else value


WATCHED = r"^[\w./-]+ (min|max)$"
"""Pattern for a metric and the direction of improvement, such as `val/loss min`."""
Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT), BeforeValidator(_whole)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Probability = Annotated[float, Field(ge=0, lt=1)]


def absolute_path(value: str) -> str:
    """Make a path absolute, since workers run in other directories. URIs such as s3://bucket are unchanged, but file://
    is a path."""
    if value.startswith("file:///"):
        return urllib.parse.unquote(value.removeprefix("file://"))
    return value if "://" in value else str(Path(value).expanduser().absolute())


HIDDEN = "***"
"""Replacement for parts of an address that may be secret."""
_SECRETS = tuple(
    re.compile(rf"(?is)(?={pattern})")  # matches may overlap
    for pattern in (
        # up to the last @: database drivers allow /, ? and # in a password. Elsewhere digits before these are a port
        r"://[^/:]*:(?!\d{1,5}[/?#])(.*)@",
        r"(?:postgresql|mysql|mssql)[^:/]*://[^/:]*:(.*)@",
        r"https?://([^/?#:@]+):?@",  # a token in place of a user name
        r"[?&;][^=&?;/]*(?:pass|pwd|token|secret|key|odbc_connect)[^=&?;/]*=([^&]*)",
    )
)


def without_password(uri: str) -> str:
    """A URI that is safe to show and store: passwords, tokens and keys are replaced by stars."""
    shown, end = "", 0
    for start, stop in sorted({match.span(1) for secret in _SECRETS for match in secret.finditer(uri)}):
        if start >= end:
            shown += uri[end:start] + HIDDEN
        end = max(end, stop)
    return shown + uri[end:]
