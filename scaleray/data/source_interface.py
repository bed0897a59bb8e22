"""Interface of a data source: rows by index, in columns."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from scaleray.common.progress import stage
from scaleray.data.ragged import Ragged, is_list_of_unequal_rows
from scaleray.errors import DataError

TRAIN = "train"  # the split that is trained on; all others are evaluated
Columns = dict[str, Any]
"""Rows by column: arrays with the rows along dimension 0, or Ragged columns."""
HASH_LIMIT_BYTES = 2**31  # larger files are identified by names and sizes: hashing them would delay every start


def rows_in(columns: Mapping[str, Any]) -> int:
    """Number of rows of a block of at least one column."""
    return len(next(iter(columns.values())))


@runtime_checkable
class Source(Protocol):
    """Interface of a data source for the pipeline."""

    num_rows: int
    row_bytes: int
    """Approximate bytes of a row in memory, which determine how many steps one task reads."""
    tokens_per_row: int | None
    group_sizes: tuple[int, ...] | None
    """Rows of each piece that can only be read as a whole, in row order; None if any row can be read alone."""

    def read(self, indices: np.ndarray) -> Columns:
        """Read the rows at `indices` (n,), in that order."""

    def describe(self) -> dict[str, Any]:
        """Kind, rows, bytes and SHA-256 (with the part that was hashed), for the run's record."""


def as_numbers(name: str, value: Any, *, allows_text: bool = False) -> np.ndarray:
    """Convert a value to an array of numbers for torch. name: column name. Raises DataError for anything else.

    allows_text: also allow text, which a preprocessor or a transform converts to numbers."""
    try:
        array = value.numpy(force=True) if hasattr(value, "numpy") and hasattr(value, "detach") else np.asarray(value)
    except ValueError as exc:
        if not isinstance(value, list | tuple):
            raise
        found = "a nested list with parts of unequal length"
        raise DataError(f"column {name}", found, "columns hold numbers", _ADVICE["list"]) from exc
    if allows_text and (array.dtype.kind in "US" or (array.dtype == object and _is_text(array))):
        return array
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))  # torch has no numbers of the other byte order
    if array.dtype.kind not in "biufc" or array.dtype in (np.longdouble, np.clongdouble):
        if array.dtype == object:
            raise _of_objects(name, array)
        raise DataError(
            f"column {name}",
            f"{array.dtype}",
            "columns hold numbers",
            "encode text or categories as integers in the workload's transform() or preprocessor(), or omit the column",
        )
    return array


_ADVICE = {
    "NoneType": "fill in the missing values, or omit the row",
    "Decimal": "convert the column with float() or int()",
    "dict": "make each of its keys a separate column",
    "list": "give rows of one length, or of one dimension that may differ",
}
"""Remedies by type of value, other than a conversion to numbers in the workload."""


def _of_objects(name: str, array: np.ndarray) -> DataError:
    """Error with the type and position of the first value that is not a number."""
    values = array.ravel().tolist()
    is_number = lambda value: isinstance(value, int | float | complex | np.number | np.bool_)
    place = next((n for n, value in enumerate(values) if not is_number(value)), 0)
    kind = type(values[place]).__name__ if values else "object"
    where = f"value {place} of column {name}" if array.ndim else f"column {name}"
    advice = "convert it to numbers in datasets() or in the workload's transform() or preprocessor(), or omit it"
    found = "nothing (None)" if kind == "NoneType" else f"a {kind}, {str(values[place])[:40] if values else ''}"
    return DataError(where, found, "columns hold numbers", _ADVICE.get(kind, advice))


def _is_text(array: np.ndarray) -> bool:
    return all(isinstance(value, str | bytes | None) for value in array.ravel().tolist())


def as_column(name: str, value: Any, *, allows_text: bool = False) -> Any:
    """Convert rows of numbers to an array, or to Ragged if their lengths differ. Raises DataError. allows_text: see
    `as_numbers`."""
    if isinstance(value, Ragged):
        return value.with_values(as_numbers(name, value.values))
    if isinstance(value, np.ndarray) and value.ndim and value.dtype == object and not (allows_text and _is_text(value)):
        value = list(value)
    if not is_list_of_unequal_rows(value):
        return as_numbers(name, value, allows_text=allows_text)
    rows = [as_numbers(name, row) for row in value]
    check_dimensions(rows, f"column {name}")
    return Ragged.of(rows)


def check_dimensions(rows: Sequence[np.ndarray], what: str) -> None:
    """Raise DataError for rows with different numbers of dimensions, or different rows without dimensions."""
    dimensions = {row.ndim for row in rows if row.size or row.ndim != 1}
    if len(dimensions) > 1 or 0 in dimensions:
        raise DataError(
            what,
            f"rows of shapes {sorted({row.shape for row in rows})[:4]}",
            "rows may differ in size but not in their number of dimensions",
            "convert them to one form as they are read, such as grey images to colour",
        )


HASH_BLOCK_BYTES = 2**24


def hash_blocks(blocks: Iterable[Any], *, num_bytes: int) -> str:
    """SHA-256 of consecutive blocks of bytes, `num_bytes` in total."""
    digest = hashlib.sha256()
    with stage("hashing the data", total=num_bytes / 2**20, unit="MiB") as hashing:
        for block in blocks:
            digest.update(block)
            hashing.advance(len(block) / 2**20)
    return digest.hexdigest()


def array_blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    """Bytes of an array in C order, in blocks, without a copy of the whole array."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    yield from (flat[start : start + HASH_BLOCK_BYTES] for start in range(0, len(flat), HASH_BLOCK_BYTES))


def hash_names(files: Sequence[tuple[str, int]]) -> str:
    """SHA-256 of names and sizes in bytes, for files that are too large to read at every start."""
    # names that are not UTF-8 come from the system as surrogates
    return hashlib.sha256(
        "\n".join(f"{path} {size}" for path, size in files).encode(errors="surrogateescape")
    ).hexdigest()
