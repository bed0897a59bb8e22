"""Fits of laws to the points of a curve: parameters with intervals, held-out errors, and values along the curve.

A law is fitted to the points, and again to every bootstrap draw of all points; intervals are those of the refitted
laws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scaleray.records.study_record import Estimate, Point
from scaleray.studies.curves.efficiency import CONFIDENCE, Draws, log_throughputs, widening
from scaleray.studies.curves.laws import Array, GivenLaw, Law, laws_for

NUM_FITS = 400
"""Number of bootstrap draws to which each law is fitted."""
LEAST_NOISE = 0.02
"""Minimum standard deviation of log throughput in the weights: points with less noise get no more weight, since no law
is more exact."""


@dataclass(frozen=True, eq=False)
class Measured:
    """Input of fits to k points: r, the workers relative to the base (k,), logarithms of throughput (k,), and their
    draws (k, NUM_FITS)."""

    base_workers: int
    r: Array
    log_throughput: Array
    draws: Draws
    weights: Array

    @classmethod
    def of(cls, points: Sequence[Point]) -> Measured:
        """Create the input of the fits from points in order of workers."""
        parts = log_throughputs(points)
        factor = widening(parts)
        deviations = np.array([part.deviations[:NUM_FITS] * factor for part in parts])
        values = np.array([part.value for part in parts])
        r = np.array([point.workers / points[0].workers for point in points])
        weights = 1.0 / (deviations.var(axis=1) + LEAST_NOISE**2)
        return cls(points[0].workers, r, values, values[:, None] + deviations, weights)


@dataclass(frozen=True, eq=False)
class FittedLaw:
    """A law with its coefficients for the points (c,), and for each draw of them (NUM_FITS, c)."""

    law: Law
    measured: Measured
    coefficients: Array
    drawn: Array
    held_out_error: float | None

    def log_throughput(self, workers: float) -> tuple[float, Draws]:
        """Log throughput at a number of workers: (by the law fitted to the points, by the law fitted to each draw)."""
        r = np.array([workers / self.measured.base_workers])
        values = self.law.log_throughput(np.vstack([self.coefficients, self.drawn]).T, r)[0]
        return float(values[0]), values[1:]

    def parameters(self) -> dict[str, Estimate]:
        """The law's parameters, relative to the base, with intervals."""
        values = self.law.parameters(self.coefficients)
        drawn = [self.law.parameters(row) for row in self.drawn]
        found = {}
        for name, value in values.items():
            low, high = np.quantile([d[name] for d in drawn], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
            found[name] = Estimate(value, min(float(low), value), max(float(high), value))
        return found


def fit_laws(points: Sequence[Point], given: Sequence[GivenLaw] = ()) -> list[FittedLaw]:
    """Fit every law that these points determine, simplest first. points: in order of workers."""
    seen = Measured.of(points)
    return [_fitted(law, seen) for law in laws_for(len(points), given, base_workers=seen.base_workers)]


def _fitted(law: Law, seen: Measured) -> FittedLaw:
    coefficients = law.fit(seen.r, seen.log_throughput, seen.weights)
    drawn = np.array([law.fit(seen.r, column, seen.weights, start=coefficients) for column in seen.draws.T])
    return FittedLaw(law, seen, coefficients, drawn, _held_out_error(law, seen))


def _held_out_error(law: Law, seen: Measured) -> float | None:
    """Mean relative error at each point when the law is fitted to the others; None if the others do not determine
    it."""
    count = len(seen.r)
    if count - 1 < law.least_points:
        return None
    errors = []
    for left_out in range(count):
        others = np.arange(count) != left_out
        coefficients = law.fit(seen.r[others], seen.log_throughput[others], seen.weights[others])
        predicted = law.log_throughput(coefficients, seen.r[left_out : left_out + 1])[0]
        errors.append(abs(math.expm1(predicted - seen.log_throughput[left_out])))
    return sum(errors) / count
