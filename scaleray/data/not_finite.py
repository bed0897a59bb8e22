"""After a non-finite loss, find rows with NaN or infinite values, so that bad data is not blamed on the learning
rate."""

import time
from dataclasses import dataclass

import numpy as np

from scaleray.data.ragged import flat_values
from scaleray.data.sample_order import StepPlan
from scaleray.data.source_interface import Columns, Source
from scaleray.data.transformed import Transformed, under_transforms

LOOK_S = 5.0
"""Seconds after which no more rows are read, as a failed run should report soon."""
AT_ONCE = 64


@dataclass(frozen=True)
class RowsOfStep:
    """Result of a search for non-finite values. bad: location of the first, or None. is_whole: whether it checked all
    rows."""

    bad: str | None
    is_whole: bool


def look_at_step(source: Source, plan: StepPlan, step: int) -> RowsOfStep:
    """Read the rows of a step, counted from 0, again: those of all workers, so that each worker reports the same."""
    positions = plan.positions(step)
    started = time.monotonic()
    for start in range(0, len(positions), AT_ONCE):
        if start and time.monotonic() - started > LOOK_S:
            return RowsOfStep(None, is_whole=False)
        few = positions[start : start + AT_ONCE]
        indices = plan.samples_at(few)
        raw = under_transforms(source).read(indices)
        if (found := _first(raw)) is not None:
            return RowsOfStep(_words(raw, found, indices, plan.name), is_whole=True)
        if isinstance(source, Transformed):
            rows = _changed(source, raw, plan.row_seeds(few))
            if (found := _first(rows)) is not None:
                after = f", after {source.transform.name} but not before it"
                return RowsOfStep(_words(rows, found, indices, plan.name) + after, is_whole=True)
    return RowsOfStep(None, is_whole=True)


def _changed(source: Source, rows: Columns, seeds: np.ndarray) -> Columns:
    """Rows after all transforms."""
    if not isinstance(source, Transformed):
        return rows
    return source.changed(_changed(source.source, rows, seeds), seeds)


def _first(rows: Columns) -> tuple[str, int] | None:
    """Column and index of the first row with a non-finite number."""
    for name, column in rows.items():
        values = flat_values(column)
        if values.dtype.kind in "fc" and not np.isfinite(values).all():
            return name, next(row for row, value in enumerate(column) if not np.isfinite(value).all())
    return None


def _words(rows: Columns, found: tuple[str, int], indices: np.ndarray, split: str) -> str:
    name, place = found
    values = np.asarray(rows[name][place])
    value = values[~np.isfinite(values)].flat[0]
    return f"column {name} of row {indices[place]} of the {split} data contains {value}"
