"""How the structure of a Dataset's items travels: in the names of the columns that its rows become.

`train[0]` and `train[1]` are a pair, `val.image` is a value of a dict, `train` is an item that is a tensor alone. A
worker reads from the names what a DataLoader would have given its module, and of which split it is.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from scaleray.errors import DataError

Way = tuple[int | str, ...]
"""Way to a value inside an item: places in lists, keys of dicts."""
PART = re.compile(r'\[(\d+)\]|\.([A-Za-z_]\w*)|\[("(?:[^"\\]|\\.)*")\]')
NAME = re.compile(r"[A-Za-z_]\w*")


def columns_of(split: str, item: Any) -> dict[str, Any]:
    """The values of a Dataset's item by the name of their column. Raises DataError for a structure that is lost on the
    way."""
    found: dict[str, Any] = {}
    _flatten(split, item, found)
    return found


def _flatten(name: str, item: Any, found: dict[str, Any]) -> None:
    if isinstance(item, Mapping):
        for key, value in item.items():
            if not isinstance(key, str):
                raise DataError(f"a key of {name}", key, "keys of an item are text", "give them names in __getitem__")
            _flatten(f"{name}.{key}" if NAME.fullmatch(key) else f"{name}[{json.dumps(key)}]", value, found)
    elif isinstance(item, (tuple, list)):
        if hasattr(item, "_fields"):
            allowed = "it would arrive as a list, without the names of its fields"
            raise DataError(f"an item of {name}", f"a {type(item).__name__}", allowed, "return a dict or a tuple")
        for place, value in enumerate(item):
            _flatten(f"{name}[{place}]", value, found)
    else:
        found[name] = item


def batch_of(columns: Mapping[str, Any]) -> tuple[str, Any]:
    """The split, and the batch as torch's own collation gives it: items that are tuples become lists."""
    split, paths = _layout(tuple(columns))
    return split, _nested([(path, columns[name]) for name, path in zip(columns, paths, strict=True)])


@functools.lru_cache(maxsize=64)
def _layout(names: tuple[str, ...]) -> tuple[str, tuple[Way, ...]]:
    split = re.split(r"[.\[]", names[0], maxsplit=1)[0]
    paths = []
    for name in names:
        parts = PART.findall(name[len(split) :])
        paths.append(tuple(int(place) if place else key or json.loads(quoted) for place, key, quoted in parts))
    return split, tuple(paths)


def _nested(values: list[tuple[Way, Any]]) -> Any:
    if len(values) == 1 and not values[0][0]:
        return values[0][1]
    inner: dict[int | str, list[tuple[Way, Any]]] = {}
    for path, value in values:
        inner.setdefault(path[0], []).append((path[1:], value))
    if all(isinstance(key, int) for key in inner):
        return [_nested(inner[place]) for place in range(len(inner))]
    return {key: _nested(below) for key, below in inner.items()}
