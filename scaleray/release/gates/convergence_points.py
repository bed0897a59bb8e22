"""Whether training converges suspiciously fast: MLPerf's test against reference convergence points.

A reference point is a set of runs of the reference at one batch size. The mean of a set leaves out its best and its
worst run (`olympic`). A submission's mean below `slowest_allowed` is faster than chance explains: its recipe, data or
target probably differs. The smallest mean that a one-sided pooled t-test does not reject, with the reference's standard
deviation for both sides, has a closed form, which is used here instead of MLPerf's bisection. Source: MLPerf Training
rules, section Reference Convergence Points; mlperf-logging 4.1.68, rcp_checker."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from scaleray.release.gates.confidence import ALPHA

LEAST_REFERENCE = 4
"""Smallest number of runs of a reference point: two remain without the best and the worst."""


@dataclass(frozen=True)
class ReferencePoint:
    """Effort to the target at one batch size: epochs or samples, the same for all points of one reference."""

    batch_size: int
    mean: float
    stdev: float
    """Standard deviation of all its runs, divided by n."""
    number: int
    """Number of runs in the mean."""

    @classmethod
    def of(cls, batch_size: int, efforts: Sequence[float], *, left_out: int = 1) -> ReferencePoint:
        """Point of these runs. left_out: number of best and of worst runs excluded from the mean."""
        return cls(batch_size, olympic(efforts, left_out=left_out), float(np.std(efforts)), len(efforts) - 2 * left_out)

    def slowest_allowed(self, submitted: int, *, alpha: float = ALPHA) -> float:
        """Smallest allowed mean of `submitted` runs, without excluded ones."""
        freedom = self.number + submitted - 2
        reach = float(stdtrit(freedom, 1 - alpha)) * self.stdev * math.sqrt(1 / self.number + 1 / submitted)
        return max(0.0, self.mean - reach)


def olympic(efforts: Sequence[float], *, left_out: int = 1) -> float:
    """Mean without the `left_out` best and worst."""
    return float(np.mean(sorted(efforts)[left_out : len(efforts) - left_out]))
