"""New rows for a model: their files, and their columns as in a workload's batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from scaleray.common.filesystems import open_filesystem
from scaleray.config.base import absolute_path, without_password
from scaleray.data.as_source import as_source, load_sources, reads_text
from scaleray.data.parquet import column_to_numpy
from scaleray.data.ragged import Ragged
from scaleray.data.source_interface import TRAIN, Columns, Source
from scaleray.data.transformed import under_transforms
from scaleray.errors import DataError, ScaleRayError, first_line
from scaleray.workload import call_user_code, own_method

FORMATS = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".jsonl": "json", ".ndjson": "json", ".json": "json"}
"""Format of a file, by extension."""
EXAMPLES = 256
"""Number of training rows that are read as examples."""


@dataclass(frozen=True)
class Files:
    """Files of rows of one format, in the order of their names. uri: the given path, absolute."""

    uri: str
    format: str
    paths: tuple[str, ...]
    is_local: bool

    @classmethod
    def at(cls, data: str | Path) -> Files:
        """Find the files at a path or s3:// URI, which may be a file or a folder. Raises DataError."""
        import pyarrow.fs

        uri = absolute_path(str(data))
        try:
            filesystem, root = open_filesystem(uri)
            info = filesystem.get_file_info(root)
            if info.type == pyarrow.fs.FileType.NotFound:
                raise DataError(
                    "--data", without_password(uri), "it does not exist", "give a file, a folder or a bucket"
                )
            found = [info] if info.is_file else filesystem.get_file_info(pyarrow.fs.FileSelector(root, recursive=True))
        except (OSError, ValueError) as exc:
            raise DataError("--data", without_password(uri), f"it cannot be read: {first_line(exc)}") from exc
        by_format: dict[str, list[str]] = {}
        for file in found:
            if file.is_file and (kind := FORMATS.get(Path(file.path).suffix.lower())):
                by_format.setdefault(kind, []).append(file.path)
        if len(by_format) != 1:
            what = f"files of {' and '.join(sorted(by_format))}" if by_format else "no file with a known extension"
            raise DataError("--data", without_password(uri), f"it has {what}", f"use one format: {', '.join(FORMATS)}")
        [(kind, paths)] = by_format.items()
        return cls(uri, kind, tuple(sorted(paths)), "://" not in uri)

    def tables(self, batch_size: int) -> Iterator[Any]:
        """Yield Arrow tables of at most this many rows, in order. Raises DataError."""
        import pyarrow as pa
        import pyarrow.dataset

        filesystem, _ = open_filesystem(self.uri)
        try:
            dataset = pyarrow.dataset.dataset(list(self.paths), filesystem=filesystem, format=self.format)
            for batch in dataset.to_batches(batch_size=batch_size):
                if batch.num_rows:
                    yield pa.Table.from_batches([batch])
        except (OSError, pa.ArrowException) as exc:
            raise DataError("--data", without_password(self.uri), f"it cannot be read: {first_line(exc)}") from exc


def own_rows(data: Any, workload: Any) -> Source | None:
    """Untransformed rows that the workload's `read_data` reads from a path; None without this method. Raises
    WorkloadError if it fails."""
    method = own_method(workload, "read_data")
    if method is None or not isinstance(data, (str, Path)) or "://" in str(data):
        return None
    path = Path(data).expanduser()
    if not path.exists():
        return None
    found = call_user_code(lambda: method(str(path)), what="read_data()", doing="reading the data")
    return None if found is None else as_source(found, split=path.stem, allows_text=reads_text(workload))


@dataclass(frozen=True)
class Shape:
    """Row shapes and types of the columns on which the run was trained, before any transform; a shape is None for rows
    of unequal length. Empty if the data is no longer available. wide: whether floating-point columns keep their width.
    examples: some training rows. allows_text: whether the workload converts text to numbers."""

    columns: Mapping[str, tuple[tuple[int, ...] | None, np.dtype]] = field(default_factory=dict)
    wide: bool = False
    examples: Columns = field(default_factory=dict)
    allows_text: bool = False

    def fit(self, columns: Columns) -> Columns:
        """Convert columns to the model's form: numbers in the training's type, with `x_0, x_1, ...` combined to `x`.
        Columns that training did not have stay. Raises DataError for another shape."""
        found = dict(columns)
        for name, (shape, dtype) in self.columns.items():
            if name not in found and shape is not None:
                self._put_together(name, shape, found)
            if name not in found or found[name].dtype.kind not in "biufc" or dtype.kind not in "biufc":
                continue
            given = None if isinstance(found[name], Ragged) else found[name].shape[1:]
            # longer shapes may be free, as that of an image
            if given != shape and shape is not None and len(shape) <= 1:
                raise DataError(
                    f"column {name}", f"of shape {given or 'ragged'} in a row", f"training had {list(shape)}"
                )
            found[name] = _as_type(found[name], dtype)
        if self.columns:  # such as a name, which nothing would make numbers of
            found = {n: v for n, v in found.items() if n in self.columns or v.dtype.kind in "biufc"}
        return {name: self._narrowed(name, values) for name, values in found.items()}

    @staticmethod
    def _put_together(name: str, shape: tuple[int, ...], found: Columns) -> None:
        if len(shape) == 1 and all(f"{name}_{number}" in found for number in range(shape[0])):
            parts = [found.pop(f"{name}_{number}") for number in range(shape[0])]
            found[name] = np.stack(parts, axis=1)

    def _narrowed(self, name: str, values: Any) -> Any:
        """Convert to the common types, as text files have no float32. For columns that are unknown from training."""
        is_wide = values.dtype == np.float64 and name not in self.columns and not self.wide
        return _as_type(values, np.dtype(np.float32)) if is_wide else values


def _as_type(values: Any, dtype: np.dtype) -> Any:
    if isinstance(values, Ragged):
        return values.with_values(values.values.astype(dtype, copy=False))
    return values.astype(dtype, copy=False)


def shape_of(workload: Any, *, wide: bool, fitted: Any = None) -> tuple[Shape, bool]:
    """Shapes of the columns of the workload's training data, and whether its rows are tuples; empty if the data can no
    longer be read. fitted: the run's preprocessor."""
    text = reads_text(workload)
    try:
        source = load_sources(workload, fitted=fitted, in_steps=True)[TRAIN]
        raw = under_transforms(source)
        rows = raw.read(np.arange(min(EXAMPLES, raw.num_rows)))
    except (ScaleRayError, OSError, TypeError):
        return Shape(wide=wide, allows_text=text), False
    return Shape(types_of(rows), wide, rows, text), gives_tuples(source)


def types_of(rows: Columns) -> dict[str, tuple[tuple[int, ...] | None, np.dtype]]:
    """Row shape and type of each column; no shape for rows of unequal length."""
    return {name: (None if isinstance(v, Ragged) else v.shape[1:], v.dtype) for name, v in rows.items()}


def gives_tuples(source: Source) -> bool:
    """Whether the rows of a source are tuples in the workload's batches."""
    return bool(getattr(source, "gives_tuples", False))


def columns_of(table: Any, where: str, *, allows_text: bool) -> tuple[Columns, list[DataError]]:
    """Columns of an Arrow table as arrays, and the faults of columns that are omitted because they have nulls or text
    that is not allowed; these may not be needed."""
    found: Columns = {}
    problems: list[DataError] = []
    for name in table.column_names:
        try:
            found[name] = column_to_numpy(name, table.column(name), where, allows_text=allows_text)
        except DataError as exc:
            problems.append(exc)
    return found, problems
