"""What a run's record says of a split: where its rows are from, who reads them, and what its columns hold, so that data
of another day can be told from these.

The rows that are looked at are the stored ones, before preprocessor and transform, and always the same ones of the same
data. A row's mean counts as one observation: values within a row, such as the pixels of an image, depend on each other.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np

from scaleray.data.iterable import IterableSource
from scaleray.data.ragged import Ragged
from scaleray.data.row_values import generators_kept
from scaleray.data.source import Source
from scaleray.data.sources import STORED
from scaleray.data.split import Split
from scaleray.data.stream_source import StreamSource
from scaleray.data.transformed import under_transforms

MOST_ROWS, MOST_COMPUTED_ROWS = 1024, 32
"""Rows that are looked at: of data that are simply stored, and of rows that user code makes, such as decoded images."""
MOST_GROUP_BYTES = 2**28
"""Largest row group that is read for this: of data in groups, rows come from the first one."""
MOST_VALUES = 32
"""Most different values of a column of whole numbers or texts that are told one by one, as of labels."""


def described(source: Source, split: Split, readers: str) -> dict[str, Any]:
    """Facts of a split for the run's record. readers: the config's `data.readers`."""
    notes = getattr(source, "notes", ())
    found = {**source.describe(), **split.reading(readers), **({"notes": list(notes)} if notes else {})}
    return found | ({"columns": columns} if (columns := columns_of(source)) else {})


def columns_of(source: Source) -> dict[str, dict[str, Any]]:
    """Facts of each column: type, shape of a row (None where rows differ), number of rows looked at, mean and standard
    deviation of the rows' means, least and largest value, share of values that are not finite, and the values
    themselves where there are few. Empty for rows that cannot be read by number, or not be read at all.
    """
    stored = under_transforms(source)
    if isinstance(stored, StreamSource | IterableSource) or not stored.num_rows:
        return {}
    with contextlib.suppress(Exception), generators_kept():  # whatever is wrong with a row is told when its turn comes
        return {name: _facts(values) for name, values in stored.read(_rows(stored)).items()}
    return {}


def _rows(source: Source) -> np.ndarray:
    most = MOST_ROWS if isinstance(source, STORED) else MOST_COMPUTED_ROWS
    last = source.num_rows
    if source.group_sizes is not None:
        last = source.group_sizes[0]
        if last * source.row_bytes > MOST_GROUP_BYTES:
            return np.empty(0, np.int64)
    return np.unique(np.linspace(0, last - 1, min(most, last)).astype(np.int64))


def _facts(column: Any) -> dict[str, Any]:
    is_ragged = isinstance(column, Ragged)
    values = column.values if is_ragged else np.asarray(column)
    found: dict[str, Any] = {
        "dtype": "text" if values.dtype.kind in "OUS" else values.dtype.name,
        "shape": None if is_ragged else list(values.shape[1:]),
        "rows": len(column),
    }
    if not len(column):
        return found
    if is_ragged:
        found["length"] = float(column.lengths.mean())
    if values.dtype.kind in "biuf" and values.size:
        found |= _numbers(list(column) if is_ragged else values, values)
    if values.dtype.kind in "biuOUS" and values.ndim == 1 and not is_ragged:
        different = sorted({value.item() if hasattr(value, "item") else str(value) for value in np.unique(values)})
        found |= {"values": different} if len(different) <= MOST_VALUES else {}
    return found


def _numbers(rows: Any, values: np.ndarray) -> dict[str, float]:
    finite = np.isfinite(values)
    found = {"not_finite": float(1 - finite.mean())}
    with np.errstate(invalid="ignore"):
        means = np.array([np.mean(row, dtype=np.float64) for row in rows if np.size(row)])
    means = means[np.isfinite(means)]
    if not len(means):
        return found
    found |= {"low": float(values[finite].min()), "high": float(values[finite].max()), "mean": float(means.mean())}
    spread = float(means.std(ddof=1)) if len(means) > 1 else math.nan
    return found | ({"stdev": spread} if math.isfinite(spread) else {})
