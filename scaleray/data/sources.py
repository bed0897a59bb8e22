"""Where rows come from. A source reads any rows by index; how they are ordered and shared is the step plan's business.

A source travels once to the Ray object store and is read by Ray tasks on any node, so it must be picklable, and a
path inside it must be visible on every node.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from scaleray.data.row_values import generators_kept, look_at_rows, spread_rows, with_row_values
from scaleray.errors import DataError
from scaleray.reproducibility.seeding import seed_row
from scaleray.workload import no_exit

Columns = dict[str, np.ndarray]
"""Rows by column: arrays with the rows along dimension 0."""

HASH_LIMIT_BYTES = 2**31  # larger files are identified by names and sizes: hashing them would delay every start


@runtime_checkable
class Source(Protocol):
    """What the pipeline needs of a data source."""

    num_rows: int
    row_bytes: int
    """About how many bytes a row takes in memory; decides how many steps one task reads."""
    tokens_per_row: int | None
    group_sizes: tuple[int, ...] | None
    """Rows of each piece that can only be read whole, in row order; None where any row can be read alone."""

    def read(self, indices: np.ndarray) -> Columns:
        """The rows at `indices` (n,), in that order."""

    def describe(self) -> dict[str, Any]:
        """Kind, rows, bytes and SHA-256 (and what was hashed), for the run's record."""


class ArraySource:
    """Arrays in memory: a dict of numpy arrays or CPU tensors with equal first dimensions."""

    group_sizes: tuple[int, ...] | None = None

    def __init__(self, arrays: Mapping[str, Any], *, tokens_per_row: int | None = None) -> None:
        self.arrays: Columns = {name: np.asarray(_as_numpy(name, value), order="C") for name, value in arrays.items()}
        if not self.arrays:
            raise DataError("an array source", "without columns", "it needs at least one array")
        lengths = {name: len(array) if array.ndim else -1 for name, array in self.arrays.items()}
        if len(set(lengths.values())) != 1 or -1 in lengths.values():
            raise DataError(
                "an array source",
                f"columns of {lengths} rows",
                "all need the same number of rows",
                "check the first dimension of each array",
            )
        self.num_rows = next(iter(lengths.values()))
        self.row_bytes = sum(a.nbytes for a in self.arrays.values()) // max(1, self.num_rows) or 1
        self.tokens_per_row = tokens_per_row

    def read(self, indices: np.ndarray) -> Columns:
        return {name: array[indices] for name, array in self.arrays.items()}

    def describe(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for name, array in sorted(self.arrays.items()):
            digest.update(f"{name}:{array.dtype.str}:{array.shape}".encode())
            digest.update(array.tobytes())
        size = sum(a.nbytes for a in self.arrays.values())
        return {
            "kind": "arrays",
            "rows": self.num_rows,
            "bytes": size,
            "sha256": digest.hexdigest(),
            "hashed": "content",
        }


class TokenSource:
    """One long sequence of tokens or bytes, cut into samples of `sequence_length` + 1 (input and its next tokens).

    tokens: a one-dimensional integer array in memory, or the path of a raw binary file of `dtype`, read by memory map.
    Rows overlap by one token, so that every token but the first is predicted once an epoch. Column: `tokens`.
    """

    group_sizes: tuple[int, ...] | None = None

    def __init__(self, tokens: np.ndarray | str | Path, *, sequence_length: int, dtype: str = "uint8") -> None:
        self.path = None if isinstance(tokens, np.ndarray) else str(Path(tokens).expanduser().absolute())
        self._array = np.ascontiguousarray(tokens) if isinstance(tokens, np.ndarray) else None
        self.dtype = np.dtype(dtype) if self._array is None else self._array.dtype
        if self.path is not None and not Path(self.path).is_file():
            raise DataError("a token file", self.path, "it does not exist")
        self.sequence_length = self.tokens_per_row = sequence_length
        self.row_bytes = (sequence_length + 1) * self.dtype.itemsize
        self.num_rows = max(0, (len(self._tokens()) - 1) // sequence_length)

    def read(self, indices: np.ndarray) -> Columns:
        positions = indices[:, None] * self.sequence_length + np.arange(self.sequence_length + 1)
        return {"tokens": np.asarray(self._tokens()[positions])}

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
            return {**facts, "sha256": _hash_names([(self.path, tokens.nbytes)]), "hashed": "name and size"}
        return {
            **facts,
            "sha256": hashlib.sha256(tokens.tobytes()).hexdigest(),
            "hashed": "content",
        }

    def _tokens(self) -> np.ndarray:
        if self._array is None:
            path = Path(str(self.path))
            has_bytes = path.stat().st_size > 0  # an empty file cannot be mapped
            self._array = np.memmap(path, dtype=self.dtype, mode="r") if has_bytes else np.empty(0, self.dtype)
        return self._array

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if self.path is not None:
            state["_array"] = None  # the map is opened again where the source arrives
        return state


class ParquetSource:
    """A Parquet file or folder, local or s3://, of numbers and fixed-length lists of numbers.

    columns: the columns to read; None reads all. Footers are read at once, so that a broken file is found at the start.
    """

    tokens_per_row: int | None = None

    def __init__(self, path: str | Path, *, columns: Sequence[str] | None = None) -> None:
        import pyarrow.fs

        self.uri = str(path) if "://" in str(path) else str(Path(path).expanduser().absolute())
        self.columns = list(columns) if columns is not None else None
        filesystem, root = self._open()
        info = filesystem.get_file_info(root)
        if info.type == pyarrow.fs.FileType.NotFound:
            raise DataError("Parquet path", self.uri, "it does not exist")
        found = [info] if info.is_file else filesystem.get_file_info(pyarrow.fs.FileSelector(root, recursive=True))
        self.files = sorted(
            (f.path, f.size) for f in found if f.is_file and (info.is_file or f.path.endswith((".parquet", ".pq")))
        )
        if not self.files:
            raise DataError("Parquet path", self.uri, "it holds no .parquet file")
        with ThreadPoolExecutor(16) as pool:
            footers = list(pool.map(lambda file: self._footer(filesystem, file[0]), self.files))
        self.groups = [(f, g) for f, footer in enumerate(footers) for g in range(footer.num_row_groups)]
        self.group_sizes = tuple(footers[f].row_group(g).num_rows for f, g in self.groups)
        self._starts = np.concatenate([[0], np.cumsum(self.group_sizes, dtype=np.int64)])
        self.num_rows = int(self._starts[-1])
        self._names = self._check_columns([footer.schema.to_arrow_schema() for footer in footers])
        total = sum(footers[f].row_group(g).total_byte_size for f, g in self.groups)
        self.row_bytes = max(1, total // max(1, self.num_rows))

    def read(self, indices: np.ndarray) -> Columns:
        import pyarrow as pa

        filesystem, _ = self._open()
        group_of = np.searchsorted(self._starts, indices, side="right") - 1
        needed = np.unique(group_of)
        tables, offsets, offset = [], np.zeros(len(self.groups), dtype=np.int64), 0
        for number in needed:
            table = self._read_group(filesystem, int(number))
            offsets[number] = offset - self._starts[number]
            offset += table.num_rows
            tables.append(table)
        rows = pa.concat_tables(tables, promote_options="default").take(pa.array(indices + offsets[group_of]))
        return {name: _column_to_numpy(name, rows.column(name), self.uri) for name in rows.column_names}

    def describe(self) -> dict[str, Any]:
        size = sum(size for _, size in self.files)
        facts = {
            "kind": "parquet",
            "rows": self.num_rows,
            "bytes": size,
            "files": len(self.files),
            "row_groups": len(self.groups),
        }
        if size > HASH_LIMIT_BYTES or ("://" in self.uri and not self.uri.startswith("file://")):
            return {**facts, "sha256": _hash_names(self.files), "hashed": "names and sizes"}
        digest = hashlib.sha256()
        for path, _ in self.files:
            with open(path, "rb") as file:
                while block := file.read(2**20):
                    digest.update(block)
        return {**facts, "sha256": digest.hexdigest(), "hashed": "content"}

    def _check_columns(self, schemas: list[Any]) -> list[str]:
        """The columns to read, which every file must have with one type."""
        first = schemas[0]
        missing = [c for c in self.columns or [] if c not in first.names]
        if missing:
            raise DataError("Parquet columns", missing, f"{self.uri} has the columns {', '.join(first.names)}")
        for (path, _), schema in zip(self.files, schemas, strict=True):
            names = self.columns or dict.fromkeys([*first.names, *schema.names])
            types = {n: [s.field(n).type if n in s.names else "missing" for s in (first, schema)] for n in names}
            for name, (expected, found) in types.items():
                if expected != found:
                    raise DataError(
                        f"column {name} of {path}",
                        str(found),
                        f"it is {expected} in {self.files[0][0]}",
                        "write all files with the same columns, or name the ones that they share in `columns`",
                    )
        return self.columns or first.names

    def _open(self) -> tuple[Any, str]:
        import pyarrow.fs

        try:
            return pyarrow.fs.FileSystem.from_uri(self.uri)
        except (OSError, ValueError) as exc:
            raise DataError("Parquet path", self.uri, f"it cannot be opened: {exc}") from exc

    def _footer(self, filesystem: Any, path: str) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with filesystem.open_input_file(path) as file:
                return pq.read_metadata(file)
        except (OSError, pa.ArrowException) as exc:
            raise DataError(
                "Parquet file", path, f"it cannot be read: {exc}", "write it again, or take it out of the folder"
            ) from exc

    def _read_group(self, filesystem: Any, number: int) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        file, group = self.groups[number]
        path = self.files[file][0]
        try:
            with filesystem.open_input_file(path) as opened:
                return pq.ParquetFile(opened).read_row_group(group, columns=self._names).select(self._names)
        except (OSError, pa.ArrowException) as exc:
            raise DataError(
                f"Parquet file {path}, row group {group},",
                "damaged",
                f"it cannot be read: {exc}",
                "write it again, or take it out of the folder",
            ) from exc


class DatasetSource:
    """A map-style torch Dataset whose items are tuples or dicts of numbers, arrays or tensors of one shape.

    Tuples arrive in the loss as tuples, dicts as dicts. Whether items draw random numbers is seen from a few of them.
    """

    group_sizes: tuple[int, ...] | None = None
    tokens_per_row: int | None = None

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.num_rows = len(dataset)
        with generators_kept():
            first = dataset[0] if self.num_rows else ()
        self.gives_tuples = self.num_rows > 0 and not isinstance(first, Mapping)
        self.row_bytes = sum(v.nbytes for v in _columns_of(first).values()) or 1
        self.row_values = look_at_rows(self._row, spread_rows(self.num_rows))

    def read(self, indices: np.ndarray) -> Columns:
        """The rows at `indices` (n,), in that order; random transforms under one seed."""
        if self.row_values.draw_random_numbers:
            return self.read_seeded(indices, np.zeros(len(indices), np.uint64))
        return self._stacked([self._row(int(i)) for i in indices])

    def read_seeded(self, indices: np.ndarray, seeds: np.ndarray) -> Columns:
        """The rows at `indices` (n,), each under its seed, uint64 (n,). Nobody else may draw random numbers meanwhile."""
        rows = []
        with generators_kept():
            for index, seed in zip(indices, seeds, strict=True):
                seed_row(int(seed))
                rows.append(self._row(int(index)))
        return self._stacked(rows)

    def _stacked(self, rows: list[Columns]) -> Columns:
        columns = {}
        for name in rows[0]:
            shapes = {row[name].shape for row in rows}
            if len(shapes) > 1:
                raise DataError(
                    f"column {name} of {type(self.dataset).__name__}",
                    f"shapes {sorted(shapes)}",
                    "all rows need one shape",
                    "pad or crop in __getitem__; count what is real in the loss",
                )
            columns[name] = np.stack([row[name] for row in rows])
        return columns

    def describe(self) -> dict[str, Any]:
        return {
            "kind": f"torch Dataset {type(self.dataset).__name__}",
            "rows": self.num_rows,
            "bytes": self.num_rows * self.row_bytes,
            "sha256": None,
            "hashed": "nothing: items are computed",
        }

    def _row(self, index: int) -> Columns:
        with no_exit(f"{type(self.dataset).__name__}.__getitem__({index})"):
            return _columns_of(self.dataset[index])


class StreamSource:
    """A Ray Dataset, streamed: its rows cannot be addressed, so their order depends on the number of workers."""

    group_sizes: tuple[int, ...] | None = None
    tokens_per_row: int | None = None

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.num_rows = dataset.count()
        self.row_bytes = 1024

    def read(self, indices: np.ndarray) -> Columns:
        raise TypeError("a Ray Dataset is streamed, not addressed by index")

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "Ray Dataset",
            "rows": self.num_rows,
            "bytes": None,
            "sha256": None,
            "hashed": "nothing: rows are computed",
        }


STORED = (ArraySource, TokenSource, ParquetSource)
"""Sources whose rows are read by scaleray alone, and are what is stored."""


def as_source(value: Any, *, split: str) -> Source:
    """The source for what a workload's `datasets()` gave for one split. Raises DataError for anything else."""
    source: Source
    if isinstance(value, Source):
        # those of this file know their rows already
        source = value if type(value) in STORED or hasattr(value, "row_values") else with_row_values(value)
    elif isinstance(value, Mapping):
        source = ArraySource(value)
    elif type(value).__module__.startswith("ray.data"):
        source = StreamSource(value)
    elif (
        hasattr(value, "__getitem__")
        and hasattr(value, "__len__")
        and not isinstance(value, (str, list, tuple, np.ndarray))
    ):
        source = DatasetSource(value)
    else:
        raise DataError(
            f"the {split} data",
            type(value).__name__,
            "it must be a dict of arrays, a source, a torch Dataset or a Ray Dataset",
            "see scaleray.data.sources",
        )
    if source.num_rows == 0:
        raise DataError(f"the {split} data", "empty", "at least one row is needed")
    return source


def _columns_of(item: Any) -> Columns:
    """The columns of a Dataset's item."""
    if not isinstance(item, Mapping):
        item = dict(enumerate(item if isinstance(item, tuple | list) else (item,)))
    return {str(name): _as_numpy(str(name), value) for name, value in item.items()}


def _as_numpy(name: str, value: Any) -> np.ndarray:
    array = value.numpy(force=True) if hasattr(value, "numpy") and hasattr(value, "detach") else np.asarray(value)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))  # torch has no numbers of the other byte order
    if array.dtype.kind not in "biufc" or array.dtype in (np.longdouble, np.clongdouble):
        raise DataError(
            f"column {name}", f"{array.dtype}", "columns hold numbers", "encode text or categories as integers first"
        )
    return array


def _column_to_numpy(name: str, column: Any, where: str) -> np.ndarray:
    import pyarrow as pa

    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    depth: list[int] = []
    while pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        if array.null_count:
            raise DataError(f"column {name} of {where}", f"{array.null_count} nulls", "every row needs a value")
        values = array.flatten()
        width, rest = divmod(len(values), max(1, len(array)))
        if rest or (not pa.types.is_fixed_size_list(array.type) and len(set(array.value_lengths().to_pylist())) > 1):
            raise DataError(
                f"column {name} of {where}",
                "lists of several lengths",
                "all rows need one length",
                "pad them when the file is written",
            )
        depth.append(width)
        array = values
    if array.null_count:
        raise DataError(
            f"column {name} of {where}",
            f"{array.null_count} nulls",
            "every row needs a value",
            "fill or drop them when the file is written",
        )
    flat = _as_numpy(name, array.to_numpy(zero_copy_only=False))
    return flat.reshape(len(column), *depth)


def _hash_names(files: Sequence[tuple[str, int]]) -> str:
    return hashlib.sha256("\n".join(f"{path} {size}" for path, size in files).encode()).hexdigest()
