"""Columns whose rows differ in length: all values one after another, and where each row begins.

Such a column is cut, indexed and joined like an array with the rows along dimension 0, without a Python object for each
row, and travels through Ray's object store as two arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np


class Ragged:
    """Column of rows of unequal length. values: (total, ...), the rows one after another; offsets: int64 (n + 1,),
    where each row begins, and the end."""

    def __init__(self, values: np.ndarray, offsets: np.ndarray) -> None:
        self.values, self.offsets = np.asarray(values), np.asarray(offsets, dtype=np.int64)

    @classmethod
    def of(cls, rows: Sequence[Any]) -> Ragged:
        """The column of these rows, arrays or lists that may differ in their first dimension alone."""
        arrays = [np.asarray(row) for row in rows]
        lengths = [len(array) for array in arrays]
        full = [array for array in arrays if len(array)] or arrays[:1]  # an empty list has no type of its own
        return cls(np.concatenate(full) if full else np.empty(0), np.concatenate([[0], np.cumsum(lengths, dtype=int)]))

    @property
    def lengths(self) -> np.ndarray:
        """Length of each row, int64 (n,)."""
        return np.diff(self.offsets)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of values and offsets."""
        return self.values.nbytes + self.offsets.nbytes

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self.values[start:stop] for start, stop in zip(self.offsets[:-1], self.offsets[1:], strict=True))

    def __getitem__(self, rows: Any) -> Any:
        """One row as an array; for a slice or an array of indices, the column of those rows."""
        if isinstance(rows, int | np.integer):
            row = range(len(self))[int(rows)]
            return self.values[self.offsets[row] : self.offsets[row + 1]]
        if isinstance(rows, slice) and rows.step in (None, 1):
            start, stop, _ = rows.indices(len(self))
            offsets = self.offsets[start : max(start, stop) + 1]
            return Ragged(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])
        index = np.arange(len(self))[rows]
        lengths = self.lengths[index]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        moved = np.repeat(self.offsets[index] - offsets[:-1], lengths)
        return Ragged(self.values[np.arange(offsets[-1]) + moved], offsets)

    def copy(self) -> Ragged:
        """The same column in memory of its own."""
        return Ragged(np.array(self.values), np.array(self.offsets))

    def __repr__(self) -> str:
        return f"Ragged({len(self)} rows of {self.values.dtype}{list(self.values.shape[1:])})"


def as_ragged(column: Any) -> Ragged:
    """A column, which may be an array (n, length, ...), as a ragged one."""
    if isinstance(column, Ragged):
        return column
    length = column.shape[1]
    return Ragged(column.reshape(-1, *column.shape[2:]), np.arange(len(column) + 1) * length)


def is_list_of_unequal_rows(value: Any) -> bool:
    """Whether a value is a list whose rows do not all have one length."""
    if not isinstance(value, list | tuple):
        return False
    return len({len(row) if _has_length(row) else -1 for row in value}) > 1


def _has_length(row: Any) -> bool:
    return hasattr(row, "__len__") and not isinstance(row, str | bytes) and getattr(row, "ndim", None) != 0


def concatenated(columns: Sequence[Any]) -> Any:
    """Columns of one name, arrays or ragged ones, one after another in memory of its own."""
    if not any(isinstance(column, Ragged) for column in columns):
        return np.concatenate(columns)
    ragged = [as_ragged(column) for column in columns]
    starts = np.cumsum([0, *(len(column.values) for column in ragged)])
    ends = [column.offsets[1:] + start for column, start in zip(ragged, starts[:-1], strict=True)]
    return Ragged(np.concatenate([column.values for column in ragged]), np.concatenate([[0], *ends]))


def joined(blocks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The columns of several blocks of rows, one block after another, in memory of their own."""
    return {name: concatenated([block[name] for block in blocks]) for name in blocks[0]}


def with_ragged(columns: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Columns, of which these are ragged even where all rows happen to have one length."""
    return {**columns, **{name: as_ragged(columns[name]) for name in names if name in columns}}


def flat_values(column: Any) -> np.ndarray:
    """All values of a column as one array."""
    values: np.ndarray = column.values if isinstance(column, Ragged) else column
    return values
