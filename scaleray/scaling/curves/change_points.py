"""Where a series of measurements changes its level, beyond its noise: the hierarchical E-divisive method.

A split is as good as its two sides are far apart, by the energy distance of all pairs of values; how often the same
values in random order have a split that is as good is its p-value. The best split that is significant divides the
series, and its parts are looked at in the same way. No distribution and no number of changes is assumed.
Sources: Matteson and James 2014, arXiv:1306.4933; for performance tests Daly et al. 2020, arXiv:2003.00584.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ALPHA = 0.05
PERMUTATIONS = 399
LEAST = 3
"""Fewest values on each side of a split. Series of less than about eight values have no significant one."""


@dataclass(frozen=True)
class ChangePoint:
    """First value of a new level of a series. before and after: medians of the parts on either side."""

    index: int
    before: float
    after: float
    p_value: float


def change_points(values: Sequence[float], *, alpha: float = ALPHA, seed: int = 0) -> list[ChangePoint]:
    """Changes of level, in order. alpha: probability of one where there is none. seed: of the random orders."""
    series, random = np.asarray(values, dtype=float), np.random.default_rng(seed)
    ends, p_values = [0, len(series)], dict[int, float]()
    waiting = [(0, len(series))]
    while waiting:
        start, end = waiting.pop()
        found = _split(series[start:end], random)
        if found is None or found[1] > alpha:
            continue
        at = start + found[0]
        p_values[at] = found[1]
        ends.append(at)
        waiting += [(start, at), (at, end)]
    ends.sort()
    return [
        ChangePoint(at, float(np.median(series[before:at])), float(np.median(series[at:after])), p_values[at])
        for before, at, after in zip(ends, ends[1:], ends[2:], strict=False)
    ]


def _split(part: np.ndarray, random: np.random.Generator) -> tuple[int, float] | None:
    """The best split of a series and its p-value; None for a series that is too short, or of one value alone."""
    if len(part) < 2 * LEAST or np.ptp(part) == 0:
        return None
    distances = np.abs(part[:, None] - part[None, :])
    at, best = _best(distances)
    orders = (random.permutation(len(part)) for _ in range(PERMUTATIONS))
    as_good = sum(_best(distances[np.ix_(order, order)])[1] >= best for order in orders)
    return at, (as_good + 1) / (PERMUTATIONS + 1)


def _best(distances: np.ndarray) -> tuple[int, float]:
    """The split with the largest energy statistic, and that statistic."""
    n = len(distances)
    sums = distances.cumsum(0).cumsum(1)
    at = np.arange(LEAST, n - LEAST + 1)
    whole, left = sums[-1, -1], sums[at - 1, at - 1]
    across = sums[at - 1, -1] - left
    right = whole - left - 2 * across
    sizes, others = at, n - at
    energy = 2 * across / (sizes * others) - left / (sizes * (sizes - 1)) - right / (others * (others - 1))
    statistic = sizes * others / n * energy
    best = int(np.argmax(statistic))
    return int(at[best]), float(statistic[best])
