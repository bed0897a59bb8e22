"""Rows of Parquet files, local or in a bucket."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from scaleray.common.filesystems import open_filesystem
from scaleray.common.printed import quantity
from scaleray.data.ragged import Ragged
from scaleray.data.source_interface import HASH_LIMIT_BYTES, Columns, as_numbers, hash_blocks, hash_names
from scaleray.errors import DataError


class ParquetSource:
    """A Parquet file or folder, local or s3://, with columns of numbers, or of lists of numbers of any length.

    columns: the columns to read; None reads all. Footers are read immediately, so a broken file is found at the start.
    lengths: the list column with the rows' lengths, for `data.bucket_by_length` and token batches, also read
    immediately."""

    tokens_per_row: int | None = None
    allows_text = False
    """Whether columns may contain text and nulls, which a preprocessor or a transform converts to numbers."""

    def __init__(self, path: str | Path, *, columns: Sequence[str] | None = None, lengths: str | None = None) -> None:
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
            raise DataError("Parquet path", self.uri, "it contains no .parquet file")
        with ThreadPoolExecutor(16) as pool:
            footers = list(pool.map(lambda file: self._footer(filesystem, file[0]), self.files))
        self.groups = [(f, g) for f, footer in enumerate(footers) for g in range(footer.num_row_groups)]
        self.group_sizes = tuple(footers[f].row_group(g).num_rows for f, g in self.groups)
        self._starts = np.concatenate([[0], np.cumsum(self.group_sizes, dtype=np.int64)])
        self.num_rows = int(self._starts[-1])
        self._names = self._check_columns([footer.schema.to_arrow_schema() for footer in footers])
        self._nulls = self._known_nulls(footers)
        self.lengths = None if lengths is None else self._lengths_of(filesystem, lengths)
        total = sum(footers[f].row_group(g).total_byte_size for f, g in self.groups)
        self.row_bytes = max(1, total // max(1, self.num_rows))

    def check_nulls(self) -> None:
        """Raise DataError if the footers report nulls that nothing converts later. Nulls not counted in a footer are
        found when the row group is read."""
        if self._nulls is not None and not self.allows_text:
            raise _null_error(*self._nulls)

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
        return {
            name: column_to_numpy(name, rows.column(name), self.uri, allows_text=self.allows_text)
            for name in rows.column_names
        }

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
            return {**facts, "sha256": hash_names(self.files), "hashed": "names and sizes"}

        def blocks() -> Iterator[bytes]:
            for path, _ in self.files:
                with open(path, "rb") as file:
                    while block := file.read(2**20):
                        yield block

        return {**facts, "sha256": hash_blocks(blocks(), num_bytes=size), "hashed": "content"}

    def _lengths_of(self, filesystem: Any, name: str) -> np.ndarray:
        import pyarrow.compute as pc

        if name not in self._names:
            raise DataError.problem(
                f"ParquetSource(lengths={name!r})", f": {self.uri} has no such column; it has {', '.join(self._names)}"
            )
        tables = (self._read_group(filesystem, number, [name]) for number in range(len(self.groups)))
        try:
            return np.concatenate([pc.list_value_length(table.column(name)).to_numpy() for table in tables])
        except NotImplementedError as exc:
            raise DataError.problem(f"ParquetSource(lengths={name!r})", ": it must be a column of lists") from exc

    def _check_columns(self, schemas: list[Any]) -> list[str]:
        """The columns to read, which must have the same type in every file."""
        first = schemas[0]
        missing = [c for c in self.columns or [] if c not in first.names]
        if missing:
            text = f"lacks {', '.join(missing)}: it has the columns {', '.join(first.names)}"
            raise DataError.problem(self.uri, text)
        for (path, _), schema in zip(self.files, schemas, strict=True):
            names = self.columns or dict.fromkeys([*first.names, *schema.names])
            types = {n: [s.field(n).type if n in s.names else "missing" for s in (first, schema)] for n in names}
            for name, (expected, found) in types.items():
                if expected != found:
                    raise DataError(
                        f"column {name} of {path}",
                        str(found),
                        f"it must be {expected}, as in {self.files[0][0]}",
                        "write all files with the same columns, or name the shared ones in `columns`",
                    )
        return self.columns or first.names

    def _known_nulls(self, footers: list[Any]) -> tuple[str, str, int, int] | None:
        """(column, file, row group, number) of the first nulls counted in the footers. Lists are not checked, since
        their counts include empty lists."""
        for file, group in self.groups:
            columns = footers[file].row_group(group)
            for number in range(columns.num_columns):
                column = columns.column(number)
                known = column.statistics if column.is_stats_set else None
                nulls = known.null_count if known is not None and known.has_null_count else 0
                if nulls and column.path_in_schema in self._names:
                    return column.path_in_schema, self.files[file][0], group, nulls
        return None

    def _open(self) -> tuple[Any, str]:
        try:
            return open_filesystem(self.uri)
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
                "Parquet file", path, f"it cannot be read: {exc}", "write it again, or remove it from the folder"
            ) from exc

    def _read_group(self, filesystem: Any, number: int, names: Sequence[str] | None = None) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        file, group = self.groups[number]
        path = self.files[file][0]
        try:
            with filesystem.open_input_file(path) as opened:
                wanted = names or self._names
                table = pq.ParquetFile(opened).read_row_group(group, columns=wanted).select(wanted)
        except (OSError, pa.ArrowException) as exc:
            raise DataError(
                f"Parquet file {path}, row group {group},",
                "damaged",
                f"it cannot be read: {exc}",
                "write it again, or remove it from the folder",
            ) from exc
        for name in () if self.allows_text else table.column_names:
            if nulls := _num_nulls(table.column(name)):
                raise _null_error(name, path, group, nulls)
        return table


def _num_nulls(column: Any) -> int:
    """Nulls among the rows of a column, or within its lists."""
    import pyarrow as pa
    import pyarrow.compute as pc

    count = column.null_count
    while pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        column = pc.list_flatten(column)
        count += column.null_count
    return int(count)


def _null_error(column: str, path: str, group: int, count: int) -> DataError:
    return DataError.problem(
        f"column {column} of {path}, row group {group},",
        f"has {quantity(count, 'null')}: every row needs a value",
        "fill or drop them when writing the file, omit the column (columns=[...]), or fill them in a preprocessor or a "
        "transform",
    )


def column_to_numpy(name: str, column: Any, where: str, *, allows_text: bool = False) -> np.ndarray | Ragged:
    """Convert an Arrow column of numbers, or of lists of numbers, to an array. where: for messages. Raises DataError.

    allows_text: keep text, and nulls as NaN or None, which a preprocessor or a transform converts to numbers."""
    import pyarrow as pa

    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    depth: list[int] = []
    offsets: np.ndarray | None = None
    while pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        if array.null_count:
            raise DataError.problem(
                f"column {name} of {where}", f"has {quantity(array.null_count, 'null')}: every row needs a value"
            )
        values = array.flatten()
        width, rest = divmod(len(values), max(1, len(array)))
        if rest or (not pa.types.is_fixed_size_list(array.type) and len(np.unique(array.value_lengths())) > 1):
            if depth or offsets is not None:
                raise DataError.problem(
                    f"column {name} of {where}",
                    "has nested lists of different lengths: rows may differ only in the length of their outer list",
                    "pad the inner lists when writing the file",
                )
            offsets = np.concatenate([[0], np.cumsum(array.value_lengths().to_numpy())])
        else:
            depth.append(width)
        array = values
    if array.null_count and not allows_text:
        raise DataError.problem(
            f"column {name} of {where}",
            f"has {quantity(array.null_count, 'null')}: every row needs a value",
            "fill or drop them when writing the file",
        )
    flat = as_numbers(name, array.to_numpy(zero_copy_only=False), allows_text=allows_text)
    return flat.reshape(len(column), *depth) if offsets is None else Ragged(flat.reshape(-1, *depth), offsets)
