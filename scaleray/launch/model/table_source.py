"""Other data as a source of rows, so that a run's model can be evaluated on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from scaleray.data.loading import as_source, for_workload
from scaleray.data.parquet import ParquetSource
from scaleray.data.ragged import joined
from scaleray.data.source import Columns, Source
from scaleray.data.sources import ArraySource
from scaleray.errors import DataError
from scaleray.launch.model.rows import Files, Shape, columns_of, own_rows, types_of

BATCH_ROWS = 65_536


def as_source_of_split(data: Any, shape: Shape, workload: Any, *, split: str, fitted: Any = None) -> Source:
    """The source, with the workload's transform, of what `--data` or `data=` gives: files of tables in memory, or what
    `datasets()` may give. shape: of the training's columns. Raises DataError."""
    if not isinstance(data, (str, Path)):
        given = as_source(data, split=split, allows_text=shape.allows_text)
        return for_workload(given, workload, split=split, fitted=fitted)
    if (own := own_rows(data, workload)) is not None:
        _refuse_missing(own.read(np.arange(1)), shape, str(data))
        return for_workload(own, workload, split=split, fitted=fitted)
    files = Files.at(data)
    if files.format == "parquet" and (stored := _as_stored(files, shape)) is not None:
        return for_workload(as_source(stored, split=split), workload, split=split, fitted=fitted)
    parts: list[Columns] = []
    for table in files.tables(BATCH_ROWS):
        names = [name for name in table.column_names if _is_wanted(name, shape)]
        columns, problems = columns_of(table.select(names), files.uri, allows_text=shape.allows_text)
        if problems:
            raise problems[0]
        parts.append(shape.fit(columns))
    if parts:
        _refuse_missing(parts[0], shape, files.uri)
    if not parts:
        raise DataError("--data", files.uri, "it has no row")
    rows = ArraySource(joined(parts), allows_text=shape.allows_text)
    return for_workload(rows, workload, split=split, fitted=fitted)


def _refuse_missing(columns: Columns, shape: Shape, where: str) -> None:
    """Raise DataError where a column of training's is missing, such as the labels."""
    if missing := [name for name in shape.columns if name not in columns]:
        there = ", ".join(columns) or "no column of numbers"
        raise DataError(f"column {missing[0]} of {where}", None, f"training had it; there are: {there}")


def _as_stored(files: Files, shape: Shape) -> ParquetSource | None:
    """The files read piece by piece, where their columns are training's as they are."""
    try:
        source = ParquetSource(files.uri, columns=list(shape.columns) or None)
        first = source.read(np.arange(1))
    except DataError:
        return None
    return source if types_of(first) == dict(shape.columns) else None


def _is_wanted(name: str, shape: Shape) -> bool:
    """Whether a column is one of training's, or one of those that are put together to one."""
    return not shape.columns or name in shape.columns or name.rpartition("_")[0] in shape.columns
