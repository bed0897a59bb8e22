"""Table of every key of the config, for `scaleray config keys` and docs/config.md."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic_core import PydanticUndefined

from scaleray.config.loading import hint_for, known_keys
from scaleray.config.synonyms import meant_by
from scaleray.config.type_words import choices_of, type_in_words, yaml_word
from scaleray.errors import ConfigError

REQUIRED = "required"
"""In place of a default where there is none."""


@dataclass(frozen=True)
class KeyRow:
    """One key of the config, in words."""

    key: str
    """Dotted name, as on the command line."""
    type: str
    """Values that it may hold, as text."""
    default: str
    """Default as written in the file, or REQUIRED."""
    meaning: str
    choices: tuple[str, ...] = ()
    """Every value that it may have, where these are a few."""


def key_rows() -> list[KeyRow]:
    """Every key, in the order of the sections."""
    rows = []
    for key, info in known_keys().items():
        default = info.get_default(call_default_factory=True)
        shown = REQUIRED if default is PydanticUndefined else yaml_word(default)
        meaning = " ".join((info.description or "").split())
        rows.append(KeyRow(key, type_in_words(info), shown, meaning, choices_of(info)))
    return rows


def rows_of(word: str) -> list[KeyRow]:
    """The keys of a section, else those whose name holds the word, else the one that others call so. Raises
    ConfigError where there is none."""
    rows = key_rows()
    wanted = word.lower().replace("-", "_")
    found = [row for row in rows if row.key == wanted or row.key.startswith(f"{wanted}.")]
    found = found or [row for row in rows if wanted in row.key] or [row for row in rows if row.key == meant_by(wanted)]
    if not found:
        hint = hint_for(wanted, [row.key for row in rows])
        raise ConfigError("the section", word, "there is no key of that name", hint)
    return found
