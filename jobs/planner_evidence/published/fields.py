"""Fields of a row as they are meant, whoever wrote them: several names for one thing, numbers in texts, nothing where
nothing sensible stands."""

from __future__ import annotations

import math
import re
from typing import Any

from scaleray.errors import ConfigError

MOST = 1e18
"""Largest number that a row can have; what is beyond is a slip. FLOPs of a whole training are the largest that any row
has as one number."""


def part(row: dict[str, Any], name: str) -> dict[str, Any]:
    """A row's `model`, `hardware`, `parallelism` or `measured`; empty where it is missing.

    Raises ConfigError for anything else.
    """
    found = row.get(name)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(name, found, "it must hold fields with values")
    return found


def number(fields: dict[str, Any], *names: str) -> float | None:
    """The first of `names` that holds a number above 0, plain or the last one of a text such as `auto 1.3x (14336)` or
    `1,024`."""
    for name in names:
        value = fields.get(name)
        if isinstance(value, bool) or value is None:
            continue
        if isinstance(value, int | float):
            found = float(value) if abs(value) < MOST else math.inf
        else:
            texts = (
                re.findall(r"\d+(?:\.\d+)?", re.sub(r"(?<=\d),(?=\d{3})", "", value)) if isinstance(value, str) else []
            )
            found = float(texts[-1]) if texts else math.nan
        if math.isfinite(found) and 0 < found < MOST:
            return found
    return None


def whole(fields: dict[str, Any], *names: str) -> int | None:
    """The first of `names` that holds a number above 0, as a whole number, at least 1.

    Raises ConfigError for one that no machine or model has.
    """
    found = number(fields, *names)
    if found is None:
        return None
    if found > 1e9:
        raise ConfigError(names[0], found, "it must be a number that a machine or a model can have")
    return max(1, round(found))


def text(fields: dict[str, Any], *names: str) -> str:
    """The first of `names` that is there, as text; empty where none is."""
    found = next((fields[name] for name in names if fields.get(name) is not None), "")
    return found if isinstance(found, str) else str(found)
