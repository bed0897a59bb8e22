"""Uncertainty of a share of the time, given that steps differ: blocks of consecutive steps are resampled.

Source: Künsch 1989, doi:10.1214/aos/1176347265 (block bootstrap for series whose neighbours depend on each other).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

RESAMPLES = 400
BLOCKS = 5
"""Blocks that the steps are cut into: long enough to hold what comes every few steps."""
LOW, HIGH = 0.05, 0.95


def drawn_columns(count: int) -> npt.NDArray[np.int64]:
    """Numbers of columns, (RESAMPLES, count), in blocks that begin anywhere; the same for the same count."""
    length = max(1, count // BLOCKS)
    draw = np.random.default_rng(0)
    starts = draw.integers(0, count, size=(RESAMPLES, -(-count // length)))
    columns = (starts[:, :, None] + np.arange(length)) % count
    return np.asarray(columns.reshape(RESAMPLES, -1)[:, :count])


def resampled_shares(
    saved: Mapping[str, npt.NDArray[np.float64]], times: npt.NDArray[np.float64]
) -> dict[str, npt.NDArray[np.float64]]:
    """Share of the time that each would save, in every resample. saved, times: seconds of each step."""
    columns = drawn_columns(len(times))
    whole = times[columns].sum(axis=1)
    return {name: values[columns].sum(axis=1) / whole for name, values in saved.items()}
