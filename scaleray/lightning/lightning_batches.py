"""Encode the structure of a Dataset's items in the names of its columns.

`train[0]` and `train[1]` are a pair, `val.image` is a value in a dict, and `train` is an item that is a single tensor.
From the names, a worker rebuilds a DataLoader's batch and its split. `train~.text@text` comes from a loader with its
own collate_fn, which gets the original items; `@` precedes a value's type."""

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from scaleray.data.ragged import Ragged
from scaleray.errors import DataError

Way = tuple[int | str, ...]
"""Path to a value inside an item: indices of lists, keys of dicts."""
PART = re.compile(r'\[(\d+)\]|\.([A-Za-z_]\w*)|\[("(?:[^"\\]|\\.)*")\]')
NAME = re.compile(r"[A-Za-z_]\w*")
COLLATED = "~"
BACK: dict[str, Callable[[np.ndarray], Any]] = {
    "": torch.from_numpy,
    "text": lambda row: row.tobytes().decode(),
    "none": lambda row: None,
    "number": lambda row: row.item(),
    "list": lambda row: row.tolist(),
    "array": lambda row: row,
}
"""Conversion of a column's row to its original type, by the type name after `@`."""


def columns_of(split: str, item: Any, *, is_exact: bool = False) -> dict[str, Any]:
    """Values of a Dataset's item by column name. is_exact: encode so that `items_of` restores the item, including text
    and lists of numbers. Raises DataError for values that would be lost."""
    found: dict[str, Any] = {}
    _flatten(split + COLLATED * is_exact, item, found, is_exact)
    return found


def _flatten(name: str, item: Any, found: dict[str, Any], is_exact: bool) -> None:
    if isinstance(item, Mapping):
        for key, value in item.items():
            if not isinstance(key, str):
                raise DataError(f"a key of {name}", key, "keys of an item must be text", "name them in __getitem__")
            below = f"{name}.{key}" if NAME.fullmatch(key) else f"{name}[{json.dumps(key)}]"
            _flatten(below, value, found, is_exact)
    elif isinstance(item, (tuple, list)) and not (is_exact and _is_list_of_numbers(item)):
        if hasattr(item, "_fields"):
            allowed = "it would arrive as a list, without the names of its fields"
            raise DataError(f"an item of {name}", f"a {type(item).__name__}", allowed, "return a dict or a tuple")
        for place, value in enumerate(item):
            _flatten(f"{name}[{place}]", value, found, is_exact)
    elif is_exact:
        kind, value = _exactly(name, item)
        found[f"{name}@{kind}" if kind else name] = value
    else:
        found[name] = item


def _is_list_of_numbers(item: Any) -> bool:
    return isinstance(item, list) and all(isinstance(value, (int, float)) for value in item)


def _exactly(name: str, item: Any) -> tuple[str, Any]:
    """Type name of a value (a key of `BACK`), and the value encoded as numbers."""
    if isinstance(item, torch.Tensor):
        return "", item
    if isinstance(item, str):
        return "text", np.frombuffer(item.encode(), np.uint8)
    if item is None:
        return "none", np.uint8(0)
    if isinstance(item, (int, float)):
        return "number", np.asarray(item)
    if isinstance(item, list):
        return "list", np.asarray(item, dtype=None if item else np.int64)
    if isinstance(item, (np.ndarray, np.generic)):
        return "array", np.asarray(item)
    allowed = "items may contain tensors, arrays, numbers, text, and lists and dicts of them"
    raise DataError(f"a value of {name}", f"a {type(item).__name__}", allowed, "convert it to a tensor in __getitem__")


def split_of(columns: Mapping[str, Any]) -> tuple[str, bool]:
    """Split of the rows, and whether its loader has its own collate_fn."""
    name = re.split(r"[.\[@]", next(iter(columns)), maxsplit=1)[0]
    return name.removesuffix(COLLATED), name.endswith(COLLATED)


def batch_of(columns: Mapping[str, Any]) -> Any:
    """The batch as returned by torch's default_collate: tuples become lists."""
    return _nested([(way, columns[name]) for name, way in zip(columns, _ways(tuple(columns)), strict=True)], list)


def items_of(columns: Mapping[str, Any]) -> Iterator[Any]:
    """Restore the original items of a Dataset from these rows."""
    ways = _ways(tuple(columns))
    back = [BACK[name.partition("@")[2]] for name in columns]
    for row in zip(*(_rows(column) for column in columns.values()), strict=True):
        yield _nested([(way, made(value)) for way, made, value in zip(ways, back, row, strict=True)], tuple)


def _rows(column: Any) -> Any:
    # rows of an array of one dimension would be plain numbers
    return (
        column
        if isinstance(column, Ragged)
        else (column[row : row + 1].reshape(column.shape[1:]) for row in range(len(column)))
    )


@functools.lru_cache(maxsize=64)
def _ways(names: tuple[str, ...]) -> tuple[Way, ...]:
    start = len(re.split(r"[.\[@]", names[0], maxsplit=1)[0])
    ways = []
    for name in names:
        parts = PART.findall(name[start:])
        ways.append(tuple(int(place) if place else key or json.loads(quoted) for place, key, quoted in parts))
    return tuple(ways)


def _nested(values: list[tuple[Way, Any]], of_places: type) -> Any:
    if len(values) == 1 and not values[0][0]:
        return values[0][1]
    inner: dict[int | str, list[tuple[Way, Any]]] = {}
    for way, value in values:
        inner.setdefault(way[0], []).append((way[1:], value))
    if all(isinstance(key, int) for key in inner):
        return of_places(_nested(inner[place], of_places) for place in range(len(inner)))
    return {key: _nested(below, of_places) for key, below in inner.items()}
