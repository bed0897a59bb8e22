"""Sources of rows. A source reads any rows by index; the step plan determines their order and each rank's part.

A source is stored once in the Ray object store and is read by Ray tasks on any node, so it must be picklable, and its
paths must be accessible on every node."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scaleray.common.seeding import seed_row
from scaleray.data.parquet import ParquetSource
from scaleray.data.ragged import Ragged, flat_values
from scaleray.data.row_values import generators_kept, look_at_rows, spread_rows
from scaleray.data.source_interface import (
    HASH_LIMIT_BYTES,
    Columns,
    array_blocks,
    as_column,
    as_numbers,
    check_dimensions,
    hash_blocks,
    hash_names,
)
from scaleray.data.user_dataset import TURNS, AsGiven
from scaleray.errors import DataError, WorkloadError, first_line, text_of
from scaleray.workload import call_user_code, no_exit

READ_ONLY = "read-only"  # in every error of numpy for an array that must not be written


class ArraySource:
    """Arrays in memory: a dict of numpy arrays or CPU tensors with equal first dimensions, or of lists of unequal
    arrays."""

    group_sizes: tuple[int, ...] | None = None
    row_s = 0.0
    """Seconds to read a row, which is only copied."""
    notes: tuple[str, ...] = ()
    """Notes for the user about reading these rows, shown at the start of a run and recorded."""
    beside: Mapping[str, Sequence[Any]] = {}
    """Columns that identify rows for readers and are not in batches, such as file names."""

    def __init__(
        self, arrays: Mapping[str, Any], *, tokens_per_row: int | None = None, allows_text: bool = False
    ) -> None:
        found = {name: as_column(name, value, allows_text=allows_text) for name, value in arrays.items()}
        self.arrays: Columns = {n: c if isinstance(c, Ragged) else np.asarray(c, order="C") for n, c in found.items()}
        if not self.arrays:
            raise DataError.problem("an array source", "has no columns: at least one array is needed")
        lengths = {n: len(array) if isinstance(array, Ragged) or array.ndim else -1 for n, array in self.arrays.items()}
        if len(set(lengths.values())) != 1 or -1 in lengths.values():
            raise DataError.problem(
                "an array source",
                f"has columns of {lengths} rows: all must have the same number of rows",
                "check the first dimension of each array",
            )
        self.num_rows = next(iter(lengths.values()))
        self.row_bytes = sum(a.nbytes for a in self.arrays.values()) // max(1, self.num_rows) or 1
        self.tokens_per_row = tokens_per_row
        self.ragged_columns = tuple(name for name, array in self.arrays.items() if isinstance(array, Ragged))
        by_column = [self.arrays[name].lengths for name in self.ragged_columns]
        self.lengths = np.max(by_column, axis=0) if by_column else None
        """Length of each row (its longest column); None if all rows have the same length."""

    def read(self, indices: np.ndarray) -> Columns:
        return {name: array[indices] for name, array in self.arrays.items()}

    def describe(self) -> dict[str, Any]:
        def blocks() -> Iterator[Any]:
            for name, array in sorted(self.arrays.items()):
                values = flat_values(array)
                yield f"{name}:{values.dtype.str}:{values.shape}".encode()
                if isinstance(array, Ragged):
                    yield from array_blocks(array.offsets)
                    if array.shapes is not None:
                        yield from array_blocks(array.shapes)
                if values.dtype == object:
                    yield "\0".join(map(str, values.tolist())).encode()
                else:
                    yield from array_blocks(values)

        size = sum(a.nbytes for a in self.arrays.values())
        return {
            "kind": "arrays",
            "rows": self.num_rows,
            "bytes": size,
            "sha256": hash_blocks(blocks(), num_bytes=size),
            "hashed": "content",
        }


class TokenSource:
    """A long sequence of tokens or bytes, cut into samples of `sequence_length` + 1 tokens (input and next tokens).

    tokens: a one-dimensional integer array in memory, or the path of a raw binary file of `dtype`, read by memory map.
    Rows overlap by one token, so that every token except the first is predicted once per epoch. Column: `tokens`.
    lanes: cut the sequence into this many contiguous parts of equal length, so that each row continues the row `lanes`
    before it, for `scaleray.CarriedState`; the columns `lane` and `place` number the part and the row within it."""

    group_sizes: tuple[int, ...] | None = None
    row_s = 0.0

    def __init__(
        self, tokens: np.ndarray | str | Path, *, sequence_length: int, dtype: str = "uint8", lanes: int | None = None
    ) -> None:
        self.path = None if isinstance(tokens, np.ndarray) else str(Path(tokens).expanduser().absolute())
        self._array = np.ascontiguousarray(tokens) if isinstance(tokens, np.ndarray) else None
        self.dtype = np.dtype(dtype) if self._array is None else self._array.dtype
        if self.path is not None and not Path(self.path).is_file():
            raise DataError("the token file", self.path, "it does not exist")
        self._windows: np.ndarray | None = None
        self.sequence_length = self.tokens_per_row = sequence_length
        self.row_bytes = (sequence_length + 1) * self.dtype.itemsize
        self.num_rows = max(0, (len(self._tokens()) - 1) // sequence_length)
        self.lanes = lanes
        if lanes is not None:
            if not 0 < lanes <= self.num_rows:
                raise DataError("lanes of TokenSource", lanes, f"there are {self.num_rows} rows", "use fewer lanes")
            self.num_rows -= self.num_rows % lanes

    def read(self, indices: np.ndarray) -> Columns:
        if self._windows is None:  # making them takes as long as copying several rows
            self._windows = np.lib.stride_tricks.sliding_window_view(self._tokens(), self.sequence_length + 1)
        if self.lanes is None:
            return {"tokens": np.asarray(self._windows[indices * self.sequence_length])}  # rows, not single tokens
        place, lane = np.divmod(indices, self.lanes)
        rows = lane * (self.num_rows // self.lanes) + place
        return {"tokens": np.asarray(self._windows[rows * self.sequence_length]), "lane": lane, "place": place}

    def describe(self) -> dict[str, Any]:
        tokens = self._tokens()
        facts = {
            "kind": "tokens",
            "rows": self.num_rows,
            "bytes": tokens.nbytes,
            "tokens": len(tokens),
            "sequence_length": self.sequence_length,
        }
        if self.path is not None and tokens.nbytes > HASH_LIMIT_BYTES:
            return {**facts, "sha256": hash_names([(self.path, tokens.nbytes)]), "hashed": "name and size"}
        return {**facts, "sha256": hash_blocks(array_blocks(tokens), num_bytes=tokens.nbytes), "hashed": "content"}

    def _tokens(self) -> np.ndarray:
        if self._array is None:
            path = Path(str(self.path))
            has_bytes = path.stat().st_size > 0  # an empty file cannot be mapped
            self._array = np.memmap(path, dtype=self.dtype, mode="r") if has_bytes else np.empty(0, self.dtype)
        return self._array

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_windows": None}
        if self.path is not None:
            state["_array"] = None  # the map is opened again where the source arrives
        return state


class DatasetSource:
    """A map-style torch Dataset whose items are tuples or dicts of numbers, arrays or tensors, of any size.

    The loss receives tuples as tuples, dicts as dicts. A few items show whether they draw random numbers. as_given:
    state recorded before any split was read; None records it now."""

    group_sizes: tuple[int, ...] | None = None
    tokens_per_row: int | None = None
    notes: tuple[str, ...] = ()
    _has_own_arrays = False

    def __init__(self, dataset: Any, *, allows_text: bool = False, as_given: AsGiven | None = None) -> None:
        self.as_given = as_given or AsGiven(dataset)
        self.dataset, self.allows_text = dataset, allows_text
        self.num_rows = length_of(dataset)
        self.lengths = getattr(dataset, "lengths", None)
        """Length of each row, if the Dataset has an attribute `lengths`."""
        with generators_kept():
            first = self._item(0) if self.num_rows else ()
        if self.num_rows and self.as_given.problem is not None:
            self._check_other_threads()
        self.gives_tuples = self.num_rows > 0 and not isinstance(first, Mapping)
        self.row_bytes = sum(v.nbytes for v in self._columns_of(first).values()) or 1
        seconds: dict[int, float] = {}
        shapes: dict[str, set[tuple[int, ...]]] = {}

        def timed_row(index: int) -> Columns:
            started = time.perf_counter()
            row = self._row(index)
            seconds.setdefault(index, time.perf_counter() - started)  # later reads may find it in a cache
            for name, values in row.items():
                shapes.setdefault(name, set()).add(values.shape)
            return row

        self.row_values = look_at_rows(timed_row, spread_rows(self.num_rows))
        self.ragged_columns = tuple(name for name, found in shapes.items() if len(found) > 1)
        """Columns whose rows differ in length, judged by a few rows."""
        self.row_s = statistics.median(seconds.values()) if seconds else 0.0
        """Seconds to read a row, as the median of a few rows."""

    def read(self, indices: np.ndarray) -> Columns:
        """Read the rows at `indices` (n,), in that order; random transforms run under one seed."""
        if self.row_values.draw_random_numbers:
            return self.read_seeded(indices, np.zeros(len(indices), np.uint64))
        return self._filled((self._row(int(i)) for i in indices), len(indices))

    def read_seeded(self, indices: np.ndarray, seeds: np.ndarray) -> Columns:
        """Read the rows at `indices` (n,), each under its seed, uint64 (n,). No other code may draw random numbers
        during this.
        """
        with generators_kept():
            return self._filled(self._seeded_rows(indices, seeds), len(indices))

    def _seeded_rows(self, indices: np.ndarray, seeds: np.ndarray) -> Iterator[Columns]:
        for index, seed in zip(indices, seeds, strict=True):
            yield self._row(int(index), int(seed))

    def _filled(self, rows: Iterator[Columns], num_rows: int) -> Columns:
        """Columns of this many rows. Rows of equal length are written into their places as soon as they are read."""
        columns: Columns = {}
        uneven: dict[str, list[np.ndarray]] = {name: [] for name in self.ragged_columns}
        for number, row in enumerate(rows):
            for name, values in row.items():
                if name in uneven:
                    uneven[name].append(values)
                    continue
                if number == 0:
                    columns[name] = np.empty((num_rows, *values.shape), values.dtype)
                column = columns[name]
                if values.shape != column.shape[1:]:
                    uneven[name] = [*column[:number], values]
                    continue
                if values.dtype != column.dtype:
                    column = columns[name] = column.astype(np.result_type(column, values))
                column[number] = values
        names = dict.fromkeys([*columns, *uneven])
        return {name: self._ragged(name, uneven[name]) if name in uneven else columns[name] for name in names}

    def _ragged(self, name: str, rows: list[np.ndarray]) -> Ragged:
        check_dimensions(rows, f"column {name} of {type(self.dataset).__name__}")
        return Ragged.of(rows)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": f"torch Dataset {type(self.dataset).__name__}",
            "rows": self.num_rows,
            "bytes": self.num_rows * self.row_bytes,
            "sha256": None,
            "hashed": "nothing: items are computed",
        }

    def _row(self, index: int, seed: int | None = None) -> Columns:
        """Copy of a row, read under the given seed and a lock."""
        with TURNS, no_exit(f"{type(self.dataset).__name__}.__getitem__({index})"):
            if seed is not None:
                seed_row(seed)
            try:
                return self._own_columns(self.dataset[index])
            except ValueError as exc:
                if READ_ONLY not in text_of(exc) or self._has_own_arrays or self.as_given.problem is not None:
                    raise
            # arrays of a Dataset that Ray has sent are shared memory; elsewhere it may write into them
            self.dataset, self._has_own_arrays = self.as_given.copy(is_writable=True), True
            return self._row(index, seed)

    def _item(self, index: int) -> Any:
        what = f"{type(self.dataset).__name__}.__getitem__({index})"
        with TURNS:
            return call_user_code(lambda: self.dataset[index], what=what, doing="reading the data")

    def _check_other_threads(self) -> None:
        """Raise DataError for a Dataset that can be read only in the thread that created it."""
        errors: list[Exception] = []

        def read() -> None:
            try:
                with generators_kept():
                    self._item(0)
            except Exception as exc:
                errors.append(exc)

        reader = threading.Thread(target=read, name="scaleray-first-row")
        reader.start()
        reader.join()
        if errors and (problem := self.as_given.problem) is not None:
            why = first_line(errors[0].__cause__ or errors[0])
            allowed = f"it cannot be used in another process or in the thread that reads the rows ({why})"
            hint = problem.hint.partition("; --local")[0]
            raise DataError(problem.what, problem.found, allowed, hint) from errors[0]

    def __copy__(self) -> DatasetSource:
        """Another source for the same object."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "dataset": None, "_has_own_arrays": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.dataset = self.as_given.copy()

    def _own_columns(self, item: Any) -> Columns:
        """Copy of a row, as its memory may belong to the Dataset and change with the next read."""
        return {name: values.copy() for name, values in self._columns_of(item).items()}

    def _columns_of(self, item: Any) -> Columns:
        if not isinstance(item, Mapping):
            item = dict(enumerate(item if isinstance(item, tuple | list) else (item,)))
        return {str(name): as_numbers(str(name), value, allows_text=self.allows_text) for name, value in item.items()}


def length_of(dataset: Any) -> int:
    """Number of rows that a Dataset reports. Raises WorkloadError if its `__len__` does not return one."""
    what = f"{type(dataset).__name__}.__len__()"
    try:
        return int(call_user_code(lambda: len(dataset), what=what, doing="reading the data"))
    except WorkloadError as exc:
        failed = exc.allowed.partition(": ")[0]
        text = f"{failed}: it must return the number of rows, an int of at least 0"
        raise WorkloadError.problem(what, text, exc.hint) from exc.__cause__


IN_MEMORY = (ArraySource, TokenSource)
"""Sources whose rows are in memory or in a mapped file, so that reading only copies them."""
STORED = (ArraySource, TokenSource, ParquetSource)
"""Sources that are read by scaleray's code alone and whose rows are the stored values."""
