"""Description of a split in a run's record: source and reader of its rows, and contents of its columns, with which
later data can be compared.

It covers the stored rows, before preprocessor and transform, and always the same rows of the same data. The mean of a
row counts as one observation, as values within a row, such as the pixels of an image, depend on each other."""

import contextlib
import math
from typing import Any

import numpy as np

from scaleray.data.iterable import IterableSource
from scaleray.data.ragged import Ragged
from scaleray.data.ray_dataset_source import StreamSource
from scaleray.data.row_values import generators_kept
from scaleray.data.source_interface import Source
from scaleray.data.sources import STORED
from scaleray.data.split_facts import Split
from scaleray.data.transformed import under_transforms

MOST_ROWS, MOST_COMPUTED_ROWS = 2048, 32
"""Number of rows to describe: of stored data, and of data that user code computes, such as decoded images."""
MOST_BYTES = 2**28
"""Maximum bytes to read for this, and of a row group; grouped data are represented by their first group."""
MOST_VALUES, ROWS_A_VALUE = 32, 16
"""Values of a column of integers or texts, such as labels, are counted individually up to this many distinct values,
with at least this many rows for each."""
NUM_QUANTILES = 129
"""Number of quantiles that record a distribution, evenly spaced from its minimum to its maximum."""


def described(source: Source, split: Split, readers: str) -> dict[str, Any]:
    """Facts about a split for the run's record. readers: the config's `data.readers`."""
    notes = getattr(source, "notes", ())
    found = {**source.describe(), **split.reading(readers), **({"notes": list(notes)} if notes else {})}
    return found | ({"columns": columns} if (columns := columns_of(source)) else {})


def columns_of(source: Source) -> dict[str, dict[str, Any]]:
    """Facts about each column: type, shape of a row (None if rows differ), number of rows read, mean, standard
    deviation and quantiles of the rows' means, number of rows that have one, least and largest value, share of
    non-finite values, quantiles of the lengths of texts and unequal rows, and the number of rows per value if there are
    few values. Empty if rows cannot be read, or not by index."""
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
        if last * source.row_bytes > MOST_BYTES:
            return np.empty(0, np.int64)
    most = min(most, max(MOST_COMPUTED_ROWS, MOST_BYTES // max(1, source.row_bytes)))
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
    is_text = values.dtype.kind in "OUS" and values.ndim == 1
    if is_ragged or is_text:
        found["lengths"] = _quantiles(column.lengths if is_ragged else np.array([len(value) for value in values]))
    if values.dtype.kind in "biuf" and values.size:
        found |= _numbers(list(column) if is_ragged else values, values)
    if values.dtype.kind in "biuOUS" and values.ndim == 1 and not is_ragged:
        different, counts = np.unique(values, return_counts=True)
        if len(different) <= min(MOST_VALUES, len(column) // ROWS_A_VALUE):
            found["values"] = {str(value): int(count) for value, count in zip(different, counts, strict=True)}
    return found


def _quantiles(values: np.ndarray) -> list[float]:
    shares = np.linspace(0, 1, min(NUM_QUANTILES, len(values)))
    return [float(f"{value:.7g}") for value in np.quantile(values, shares, method="inverted_cdf")]


def _numbers(rows: Any, values: np.ndarray) -> dict[str, Any]:
    finite = np.isfinite(values)
    found: dict[str, Any] = {"not_finite": float(1 - finite.mean())}
    with np.errstate(invalid="ignore"):
        if values.ndim == 1 and rows is values:  # each row is its own mean
            means = values.astype(np.float64)
        else:
            means = np.array([np.mean(row, dtype=np.float64) for row in rows if np.size(row)])
    means = means[np.isfinite(means)]
    if not len(means):
        return found
    found |= {"finite_rows": len(means), "quantiles": _quantiles(means)}
    found |= {"low": float(values[finite].min()), "high": float(values[finite].max()), "mean": float(means.mean())}
    spread = float(means.std(ddof=1)) if len(means) > 1 else math.nan
    return found | ({"stdev": spread} if math.isfinite(spread) else {})
