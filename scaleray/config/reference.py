"""Table of every key of the config, for `scaleray config keys` and docs/config.md."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic_core import PydanticUndefined

from scaleray.config.loading import known_keys, type_name


@dataclass(frozen=True)
class KeyRow:
    """One key of the config, in words."""

    key: str
    """Dotted name, as on the command line."""
    type: str
    default: str
    """Default as text; `required` where there is none."""
    meaning: str


def key_rows() -> list[KeyRow]:
    """Every key, in the order of the sections."""
    rows = []
    for key, info in known_keys().items():
        default = info.get_default(call_default_factory=True)
        shown = "required" if default is PydanticUndefined else "null" if default is None else str(default)
        rows.append(KeyRow(key, type_name(info.annotation), shown, " ".join((info.description or "").split())))
    return rows
