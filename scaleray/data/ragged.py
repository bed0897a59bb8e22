"""Columns whose rows differ in size: all values one after another, and the offset of each row.

Such a column is sliced, indexed and joined like an array with the rows along dimension 0, without a Python object for
each row. In Ray's object store it is two arrays, or three with row shapes if rows differ in more than length, as images
do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np


class Ragged:
    """Column of rows of unequal length. values: (total, ...), the rows one after another. offsets: int64 (n + 1,), the
    start of each row and the end. shapes: int64 (n, dimensions) if rows differ in other dimensions than the first, and
    values are then flat (total,); otherwise None."""

    def __init__(self, values: np.ndarray, offsets: np.ndarray, shapes: np.ndarray | None = None) -> None:
        self.values, self.offsets = np.asarray(values), np.asarray(offsets, dtype=np.int64)
        self.shapes = None if shapes is None else np.asarray(shapes, dtype=np.int64)

    @classmethod
    def of(cls, rows: Sequence[Any]) -> Ragged:
        """Column of the given rows, which are arrays or lists of equal dimensionality."""
        arrays = [np.asarray(row) for row in rows]
        full = [array for array in arrays if len(array)] or arrays[:1]  # an empty list has no type of its own
        shapes = np.array([array.shape for array in arrays]) if len({array.shape[1:] for array in full}) > 1 else None
        sizes = [len(array) if shapes is None else array.size for array in arrays]
        values = [array if shapes is None else array.reshape(-1) for array in full]
        offsets = np.concatenate([[0], np.cumsum(sizes, dtype=int)])
        return cls(np.concatenate(values) if values else np.empty(0), offsets, shapes)

    @property
    def lengths(self) -> np.ndarray:
        """Length of each row along its first dimension, int64 (n,)."""
        return np.diff(self.offsets) if self.shapes is None else self.shapes[:, 0]

    @property
    def sizes(self) -> str:
        """Sizes of the rows, as text."""
        if self.shapes is None:
            return f"{int(self.lengths.min())} to {int(self.lengths.max())} values"
        found = sorted({tuple(shape) for shape in self.shapes.tolist()})
        return f"{' x '.join(map(str, found[0]))} to {' x '.join(map(str, found[-1]))} values"

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of values, offsets and shapes."""
        return self.values.nbytes + self.offsets.nbytes + (0 if self.shapes is None else self.shapes.nbytes)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[row] for row in range(len(self)))

    def __getitem__(self, rows: Any) -> Any:
        """One row as an array, or the column of several rows for a slice or an array of indices."""
        if isinstance(rows, int | np.integer):
            row = range(len(self))[int(rows)]
            values = self.values[self.offsets[row] : self.offsets[row + 1]]
            return values if self.shapes is None else values.reshape(self.shapes[row])
        shapes = None if self.shapes is None else self.shapes[rows]
        if isinstance(rows, slice) and rows.step in (None, 1):
            start, stop, _ = rows.indices(len(self))
            offsets = self.offsets[start : max(start, stop) + 1]
            return Ragged(self.values[offsets[0] : offsets[-1]], offsets - offsets[0], shapes)
        index = np.arange(len(self))[rows]
        lengths = np.diff(self.offsets)[index]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        moved = np.repeat(self.offsets[index] - offsets[:-1], lengths)
        return Ragged(self.values[np.arange(offsets[-1]) + moved], offsets, shapes)

    def with_values(self, values: np.ndarray) -> Ragged:
        """A column with these values and the same row sizes."""
        return Ragged(values, self.offsets, self.shapes)

    def copy(self) -> Ragged:
        """A copy of the column."""
        return Ragged(
            np.array(self.values), np.array(self.offsets), None if self.shapes is None else np.array(self.shapes)
        )

    def __repr__(self) -> str:
        of = list(self.values.shape[1:]) if self.shapes is None else f" of {self.sizes}"
        return f"Ragged({len(self)} rows of {self.values.dtype}{of})"


def as_ragged(column: Any) -> Ragged:
    """Convert a column, which may be an array (n, length, ...), to Ragged."""
    if isinstance(column, Ragged):
        return column
    length = column.shape[1]
    return Ragged(column.reshape(-1, *column.shape[2:]), np.arange(len(column) + 1) * length)


def with_shapes(column: Any) -> Ragged:
    """Add the shape of each row to a column, which may be an array."""
    if isinstance(column, Ragged) and column.shapes is not None:
        return column
    ragged = as_ragged(column)
    inner = ragged.values.shape[1:]
    shapes = np.array([(length, *inner) for length in ragged.lengths], dtype=np.int64).reshape(-1, 1 + len(inner))
    return Ragged(ragged.values.reshape(-1), ragged.offsets * int(np.prod(inner, dtype=np.int64)), shapes)


def is_list_of_unequal_rows(value: Any) -> bool:
    """Whether a value is a list of rows of different sizes."""
    if not isinstance(value, list | tuple):
        return False
    return len({_size(row) for row in value}) > 1


def _size(row: Any) -> Any:
    shape = getattr(row, "shape", None)
    if shape is not None:
        return tuple(shape) or -1
    return (len(row),) if _has_length(row) else -1


def _has_length(row: Any) -> bool:
    return hasattr(row, "__len__") and not isinstance(row, str | bytes) and getattr(row, "ndim", None) != 0


def concatenated(columns: Sequence[Any]) -> Any:
    """Concatenate the parts of one column, arrays or Ragged, as a copy."""
    if not any(isinstance(column, Ragged) for column in columns):
        return np.concatenate(columns)
    have_shapes = any(isinstance(column, Ragged) and column.shapes is not None for column in columns)
    ragged = [with_shapes(column) if have_shapes else as_ragged(column) for column in columns]
    starts = np.cumsum([0, *(len(column.values) for column in ragged)])
    ends = [column.offsets[1:] + start for column, start in zip(ragged, starts[:-1], strict=True)]
    shapes = np.concatenate([column.shapes for column in ragged]) if have_shapes else None
    return Ragged(np.concatenate([column.values for column in ragged]), np.concatenate([[0], *ends]), shapes)


def joined(blocks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Concatenate the columns of several blocks of rows, as copies."""
    return {name: concatenated([block[name] for block in blocks]) for name in blocks[0]}


def with_ragged(columns: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Convert the named columns to Ragged, even if all their rows happen to have one length."""
    return {**columns, **{name: as_ragged(columns[name]) for name in names if name in columns}}


def flat_values(column: Any) -> np.ndarray:
    """All values of a column as one array."""
    values: np.ndarray = column.values if isinstance(column, Ragged) else column
    return values
