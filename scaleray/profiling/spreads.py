"""Summaries of quantities measured in every step: totals, spread, and development over time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from scaleray.records.profile_record import Spread


def spread(total: float, values: np.ndarray, series: Sequence[float] = ()) -> Spread:
    """Summary of a quantity measured in every step. values: of single steps. series: its mean in each bucket."""
    if not len(values):
        return Spread(total, 0.0, 0.0, list(series))
    median, p90 = np.percentile(values, (50, 90))
    return Spread(float(total), float(median), float(p90), [float(value) for value in series])


def steps_in_buckets(num_steps: int, width: int) -> np.ndarray:
    """Number of steps in each bucket."""
    count = -(-num_steps // width)
    return np.minimum(width, num_steps - width * np.arange(count))


def rounded(values: Iterable[float]) -> list[float]:
    """The values with seven digits, beyond the precision of a clock, which keeps records of many ranks small."""
    return [float(f"{value:.7g}") for value in values]
