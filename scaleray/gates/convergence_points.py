"""Whether training converges suspiciously fast: MLPerf's test against reference convergence points.

A reference point is a set of runs of the reference at one batch size. The mean of a set leaves out its best and its
worst run (`olympic`). A submission's mean below `slowest_allowed` is faster than chance explains: its recipe, data or
target is likely another one. The smallest mean that a one-sided pooled t-test does not reject, with the reference's
standard deviation for both sides, has a closed form, which stands here in place of MLPerf's bisection.
Source: MLPerf Training rules, section Reference Convergence Points; mlperf-logging 4.1.68, rcp_checker.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from scipy.stats import t

Found = Literal["point", "interpolated", "smaller than all", "larger than all"]
ALPHA = 0.05
LEAST_REFERENCE = 4
"""Smallest number of runs of a reference point: two are left when the best and the worst are out."""


@dataclass(frozen=True)
class ReferencePoint:
    """Effort to the target at one batch size: epochs or samples, as all points of one reference have it."""

    batch_size: int
    mean: float
    stdev: float
    """Standard deviation of all its runs, divided by n."""
    number: int
    """Runs that the mean is of: without those left out."""
    efforts: tuple[float, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, batch_size: int, efforts: Sequence[float], *, left_out: int = 1) -> ReferencePoint:
        """The point of these runs. left_out: number of best and of worst runs that the mean leaves out."""
        return cls(
            batch_size,
            olympic(efforts, left_out=left_out),
            float(np.std(efforts)),
            len(efforts) - 2 * left_out,
            tuple(sorted(efforts)),
        )

    def slowest_allowed(self, submitted: int, *, alpha: float = ALPHA) -> float:
        """The smallest mean that `submitted` runs may have, the left out ones not counted."""
        freedom = self.number + submitted - 2
        reach = float(t.ppf(1 - alpha, freedom)) * self.stdev * math.sqrt(1 / self.number + 1 / submitted)
        return max(0.0, self.mean - reach)


def olympic(efforts: Sequence[float], *, left_out: int = 1) -> float:
    """Mean without the `left_out` best and worst."""
    return float(np.mean(sorted(efforts)[left_out : len(efforts) - left_out]))


def pruned(points: Sequence[ReferencePoint]) -> list[ReferencePoint]:
    """The points that a test may use, by batch size: none below the batch size that needs least, and none that needs
    more than the line between its neighbours. A point that goes is looked for once, as in MLPerf's own code, so that
    what is left need not be convex."""
    kept = sorted(points, key=lambda point: point.batch_size)
    fastest = min(kept, key=lambda point: point.mean)
    kept = [point for point in kept if point.batch_size >= fastest.batch_size]
    at = 1
    while at < len(kept) - 1:
        before, point, after = kept[at - 1 : at + 2]
        if point.mean > _between(point.batch_size, before, after).mean:
            del kept[at]
        else:
            at += 1
    return kept


def point_at(batch_size: int, points: Sequence[ReferencePoint], *, number: int) -> tuple[ReferencePoint, Found]:
    """The reference for a batch size: its own point, the line between its neighbours (`number`: runs that such a point
    counts for), or the nearest end."""
    found = sorted(points, key=lambda point: point.batch_size)
    for point in found:
        if point.batch_size == batch_size:
            return point, "point"
    for low, high in itertools.pairwise(found):
        if low.batch_size < batch_size < high.batch_size:
            between = _between(batch_size, low, high)
            return ReferencePoint(batch_size, between.mean, between.stdev, number), "interpolated"
    return (found[0], "smaller than all") if batch_size < found[0].batch_size else (found[-1], "larger than all")


def _between(batch_size: int, low: ReferencePoint, high: ReferencePoint) -> ReferencePoint:
    share = (batch_size - low.batch_size) / (high.batch_size - low.batch_size)
    mean = low.mean + share * (high.mean - low.mean)
    return ReferencePoint(batch_size, mean, low.stdev + share * (high.stdev - low.stdev), low.number)
