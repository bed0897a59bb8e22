"""Records as JSON: the common parts of every record.json, and the conversion of values."""

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError

from scaleray.common.parsing import inert_json, load_json
from scaleray.common.printed import Printed, printable
from scaleray.errors import first_line

SCHEMA_VERSION = 1
"""Version of the keys of all records and of `--json` output. It increases when a key is removed or changes its meaning;
keys may be added within a version."""


class NewerRecord(ValueError):
    """The record's format is newer than this version of scaleray supports."""


@dataclass(frozen=True)
class JsonRecord(Printed):
    """A record that is stored in a record.json."""

    schema_version: int = field(default=SCHEMA_VERSION, kw_only=True)
    """Version of the keys, see SCHEMA_VERSION. Records without it have version 1."""

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON values; NaN and infinity become null, since JSON has neither."""
        values: dict[str, Any] = jsonable(dataclasses.asdict(self))
        return values

    def to_json(self) -> str:
        """The record as indented JSON."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parse the text of a record.json. Raises NewerRecord, or pydantic's ValidationError if it is not a record."""
        adapter: TypeAdapter[Self] = _adapter(cls)  # type: ignore[arg-type]  # a class is hashable
        found = adapter.validate_json(of_known_version(inert_json(text)))
        if isinstance(name := getattr(found, "name", None), str):
            object.__setattr__(found, "name", printable(name))
        return found

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a record.json written by `to_json`. Raises the errors of `from_json`."""
        return cls.from_json(Path(path).read_text())


def of_known_version(text: str | bytes) -> str | bytes:
    """Return the text unchanged. Raises NewerRecord for a newer version, whose keys would be lost or misread."""
    try:
        values = load_json(text)
    except ValueError:
        return text
    version = values.get("schema_version") if isinstance(values, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        allowed = f"this version of scaleray reads only up to {SCHEMA_VERSION}: use a newer one"
        raise NewerRecord(f"schema_version is {version}, and {allowed}")
    return text


_adapter = functools.cache(TypeAdapter)


def check_types(kind: type, values: Mapping[str, Any]) -> None:
    """Raise TypeError with the key if a value does not have the type declared in the record's class. null is accepted
    for any number, since it represents a number that was not finite."""
    try:
        _adapter(kind).validate_python(values)
    except ValidationError as exc:
        for error in exc.errors():
            if error["type"] != "float_type" or error["input"] is not None:
                raise TypeError(_problem(error)) from exc


def first_problem(exc: Exception) -> str:
    """Reason why a text is not a record, in one line, such as `steps is missing`."""
    return _problem(exc.errors()[0]) if isinstance(exc, ValidationError) else first_line(exc)


def _problem(error: Mapping[str, Any]) -> str:
    key = ".".join(str(part) for part in error["loc"]) or "it"
    return f"{key} is missing" if error["type"] == "missing" else f"{key} is {error['input']!r:.80}: {error['msg']}"


def jsonable(value: Any) -> Any:
    """The value as JSON: NaN and infinity become null, and other objects become text."""
    if isinstance(value, dict):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(v) for v in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def leaves(value: Any, prefix: str = "", *, of_lists: bool = True) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of all leaves of nested mappings; empty mappings are skipped. of_lists: include those in
    lists of mappings."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, f"{prefix}{key}.", of_lists=of_lists)
    elif of_lists and isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
        for number, inner in enumerate(value):
            yield from leaves(inner, f"{prefix}{number}.")
    else:
        yield prefix.removesuffix("."), value
