"""A table of steps in bounded space: totals of all, rows of some, sums over time."""

from __future__ import annotations

import numpy as np
import pytest

from scaleray.records.profile_record import MOST_BUCKETS
from scaleray.training.profile.phase_times import MOST_ROWS, StepRows


def table_of(values, *, chunk):
    rows = StepRows(("a", "b"))
    for start in range(0, len(values), chunk):
        rows.add(values[start : start + chunk])
    return rows


@pytest.mark.parametrize("num_steps", [1, 7, MOST_BUCKETS, MOST_BUCKETS + 1, 999, 12_345])
@pytest.mark.parametrize("chunk", [1, 64, 1000])
def test_totals_and_sums_over_time_have_every_step_once(num_steps, chunk):
    if chunk == 1 and num_steps > 1000:
        num_steps = 1000
    values = np.random.default_rng(0).integers(0, 100, (num_steps, 2)).astype(float)
    rows = table_of(values, chunk=chunk)
    assert rows.num_steps == num_steps and list(rows.totals) == list(values.sum(axis=0))
    assert len(rows.series) <= MOST_BUCKETS
    width = rows.bucket_width
    for number, sums in enumerate(rows.series):
        assert list(sums) == list(values[number * width : (number + 1) * width].sum(axis=0))


def test_rows_are_those_of_every_nth_step_and_never_too_many():
    values = np.arange(20_000, dtype=float).reshape(-1, 2)
    rows = table_of(values, chunk=64)
    assert rows.every == 8 and len(rows.rows) <= MOST_ROWS
    assert np.array_equal(rows.rows, values[:: rows.every].astype(np.float32))
