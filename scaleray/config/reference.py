"""Table of all config keys, for `scaleray config keys` and docs/config.md."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from scaleray.config.base import LARGEST_COUNT, Duration, Target, WorkerRange
from scaleray.config.loading import hint_for, known_keys
from scaleray.config.run import RunConfig
from scaleray.config.synonyms import meant_by
from scaleray.errors import ConfigError

PLAIN: dict[Any, str] = {
    str: "text",
    Duration: "a length such as 3 epochs or 500 steps",
    Target: "a target such as val/accuracy >= 0.97",
    WorkerRange: "a range such as {min: 1, max: 4}",
}


TORCH_DEFAULTS = (("adamw", "AdamW", "weight_decay", 0.01), ("sgd", "SGD", "momentum", 0.0))
"""Optimizers, their classes in torch, and the keys whose defaults differ."""


def type_text(field: FieldInfo) -> str:
    """Allowed values of a config field, as text."""
    return _words(field.annotation, field.metadata)


def choices_of(field: FieldInfo) -> tuple[str, ...]:
    """Values of a field with a fixed set of values, as written in the file; otherwise empty."""
    return tuple(_choices(field.annotation))


def yaml_word(value: Any) -> str:
    """A default as written in the file."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(yaml_word, value)) + "]"
    return "''" if value == "" else str(value)


def _words(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        inner = [rule for one in args[1:] for rule in (one.metadata if isinstance(one, FieldInfo) else [one])]
        return _words(args[0], [*metadata, *inner])
    if choices := _choices(annotation):
        return " or ".join(choices) if len(choices) <= 2 else f"one of {', '.join(choices)}"
    if origin in (typing.Union, types.UnionType):
        kinds = [_words(one) for one in args if one is not type(None)]
        return ", or ".join([*kinds, *(["null"] if type(None) in args else [])])
    if origin is tuple:
        return _list(args)
    if origin is dict or annotation is dict:
        return "a mapping"
    if annotation in (int, float):
        return ("a whole number" if annotation is int else "a number") + _bounds(metadata)
    name = PLAIN.get(annotation) or getattr(annotation, "__name__", str(annotation)).lower()
    return name + (", not empty" if any(getattr(rule, "min_length", None) for rule in metadata) else "")


def _choices(annotation: Any) -> list[str]:
    """Values of a type with a fixed set of values; otherwise empty."""
    if annotation is bool:
        return ["true", "false"]
    if annotation is type(None):
        return ["null"]
    args = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return [yaml_word(value) for value in args]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        each = [_choices(one) for one in args]
        return [value for values in each for value in values] if all(each) else []
    return []


def _list(args: tuple[Any, ...]) -> str:
    if choices := _choices(args[0]):
        return f"a list of any of {', '.join(choices)}"
    many = _words(args[0])
    for one, more in (("a number", "numbers"), ("a whole number", "whole numbers"), ("text", "texts")):
        many = more + many.removeprefix(one) if many.startswith(one) else many
    return f"a list of {many}" if args[-1] is ... else f"a list of {len(args)} {many}"


def _bounds(metadata: Iterable[Any]) -> str:
    """`above 0`, `of at least 1`, `from 0 to 1`, from the limits of annotated-types; limits of storage are omitted."""
    limits = {
        name: getattr(rule, name) for rule in metadata for name in ("gt", "ge", "lt", "le") if hasattr(rule, name)
    }
    if limits.get("le") == LARGEST_COUNT or limits.get("lt") == 2**63:
        limits = {name: value for name, value in limits.items() if name in ("gt", "ge")}
    shown = {name: f"{value:,}" if isinstance(value, int) else f"{value:g}" for name, value in limits.items()}
    if "ge" in shown and ("le" in shown or "lt" in shown):
        return f" from {shown['ge']} to {shown.get('le') or 'below ' + shown['lt']}"
    words = {"gt": "above", "ge": "of at least", "lt": "below", "le": "at most"}
    parts = [f"{words[name]} {shown[name]}" for name in words if name in shown]
    return f" {', '.join(parts)}" if parts else ""


REQUIRED = "required"
"""Placeholder for the default of a key without one."""


@dataclass(frozen=True)
class KeyRow:
    """Documentation of one config key."""

    key: str
    """Dotted name, as on the command line."""
    type: str
    """Allowed values, as text."""
    default: str
    """Default as written in the file, or REQUIRED."""
    meaning: str
    choices: tuple[str, ...] = ()
    """All allowed values, if they are a fixed set."""


def key_rows() -> list[KeyRow]:
    """All keys, in the order of the sections."""
    rows = []
    for key, info in known_keys().items():
        default = info.get_default(call_default_factory=True)
        shown = REQUIRED if default is PydanticUndefined else yaml_word(default)
        meaning = " ".join((info.description or "").split())
        rows.append(KeyRow(key, type_text(info), shown, meaning, choices_of(info)))
    return rows


def changed_values(config: RunConfig) -> dict[str, Any]:
    """Config keys without a default or with a different value, as written in a file."""
    found: dict[str, Any] = {}
    shown = config.to_dict()
    for key, info in known_keys().items():
        section, _, name = key.rpartition(".")
        value = getattr(getattr(config, section) if section else config, name)
        if value == info.get_default(call_default_factory=True):
            continue
        if section:
            found.setdefault(section, {})[name] = str(value) if isinstance(value, Duration) else shown[section][name]
        else:
            found[name] = shown[name]
    return found


def with_singulars(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a whole config, by section, with lengths such as `1 epoch` rather than `1 epochs`."""
    for section, _, name in (key.partition(".") for key, info in known_keys().items() if "Duration" in repr(info)):
        if values[section][name] is not None:
            values[section][name] = str(Duration.parse(values[section][name]))
    return values


def unlike_torch(config: RunConfig) -> list[str]:
    """One sentence for each optimizer key whose default in scaleray differs from torch's."""
    settings = config.optimizer
    return [
        f"optimizer.{name} is {yaml_word(ours)} by default; in torch's {title} it is {theirs}"
        for optimizer, title, name, theirs in TORCH_DEFAULTS
        if settings.name == optimizer and getattr(settings, name) == (ours := type(settings).model_fields[name].default)
    ]


def rows_of(word: str) -> list[KeyRow]:
    """Return the keys of a section, or else those whose name contains the word, or else the key for a word of other
    libraries. Raises ConfigError if there is none."""
    rows = key_rows()
    wanted = word.lower().replace("-", "_")
    found = [row for row in rows if row.key == wanted or row.key.startswith(f"{wanted}.")]
    found = found or [row for row in rows if wanted in row.key] or [row for row in rows if row.key == meant_by(wanted)]
    if not found:
        hint = hint_for(wanted, [row.key for row in rows])
        raise ConfigError("the section", word, "no key has this name", hint)
    return found


def config_keys(section: str | None = None) -> list[dict[str, str]]:
    """List the config keys with their allowed values, defaults and meanings.

    section: only this section, such as `optimizer`, or the keys whose name contains this word. Raises UsageError.
    """
    return [dataclasses.asdict(row) for row in (key_rows() if section is None else rows_of(section))]
