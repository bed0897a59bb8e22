"""Extrapolation of a fitted curve: the next doubling with its interval, or the reason why none is predicted.

The interval covers two uncertainties: that of the measurements, from the law's fits to bootstrap draws; and that of the
law, which repeats do not reduce. Points within a node do not show the network between nodes: predictions for 75
published doublings that were the first to leave a node were wrong by 55 % (root mean square), those for 296 others by
13 %. Therefore, no doubling beyond a node is predicted."""

import math
from dataclasses import dataclass

import numpy as np

from scaleray.common.printed import quantity
from scaleray.records.study_record import CurvePoint, Estimate, NextDoubling
from scaleray.studies.curves.efficiency import CONFIDENCE, MOST_LOG, Draws, log_throughputs, widening
from scaleray.studies.curves.fitting import NUM_FITS, FittedLaw


@dataclass(frozen=True)
class LawError:
    """Standard deviation of log throughput one doubling further due to the law: the root of the sum of squares
    of `least`, `of_loss` times the loss so far (1 - efficiency), and `of_held_out` times the held-out error."""

    least: float
    of_loss: float
    of_held_out: float

    def at(self, *, loss: float, held_out_error: float | None) -> float:
        """Standard deviation for one curve. loss: 1 - efficiency of its last point; held_out_error: held-out error of
        the law; None counts as 0."""
        return math.hypot(self.least, self.of_loss * loss, self.of_held_out * (held_out_error or 0.0))


TWO_POINTS, MORE_POINTS = LawError(0.04, 0.7, 0.0), LawError(0.04, 0.5, 0.5)
"""Errors of laws on two points and on more points, fitted to 296 doublings of published curves that were predicted from
the points before them, by the chosen law: weak and strong scaling of CNNs and transformers on 1 to 32 V100, P100, T4,
A100 and H100 (DLPerf, NVIDIA DLExamples, TensorFlow 2017, LLM Foundry, and the traces of Pollux and Sia). The intervals
contain 93 % of them, and 96 % of those from 3 or more points; with constants chosen without one source, they contain 89
% of that source. The noise of those measurements, which were not repeated, is not in the intervals. Gains above 2 are
not capped, as 11 % of the doublings had one."""
WIDEST = 1.0
"""Maximum width of the gain's interval for a prediction: no gain and the full gain differ by 1."""
NUM_BAND_POINTS = 24
_SEED = 20


def refusal(points: list[CurvePoint], workers_per_node: int | None) -> str:
    """Reason why the points support no extrapolation by any law, or ""."""
    first, last = points[0].point, points[-1].point
    if len(points) < 2:
        only = quantity(last.workers, "worker")
        return f"one point, {only}, shows no curve: measure at least one more number of workers"
    if drop := _drop(points):
        return drop
    if last.workers < 2 * first.workers:
        span = f"points from {first.workers} to {last.workers} workers span less than one doubling"
        return f"{span}, too little to predict another"
    if workers_per_node is not None and last.workers <= workers_per_node < 2 * last.workers:
        more = 2 * last.workers
        return f"{more} workers would be the first to span nodes, whose network was not measured (measure {more})"
    return ""


def next_doubling(points: list[CurvePoint], fitted: FittedLaw) -> NextDoubling:
    """Prediction of this law for twice the largest number of workers, with its interval."""
    largest = points[-1]
    workers = 2 * largest.point.workers
    growth, draws = _growth(fitted, _loss(points), largest.point.workers, workers)
    base, *_, measured = log_throughputs([at.point for at in points])
    noise = (measured.deviations - base.deviations)[:NUM_FITS] * widening([measured, base])
    efficiency = growth + math.log(largest.efficiency.value / 2)
    return NextDoubling(
        workers=workers,
        gain=_estimate(growth, draws),
        efficiency=_estimate(efficiency, efficiency + draws - growth + noise),
        cost_factor=2.0,
    )


def is_too_wide(doubling: NextDoubling) -> bool:
    """Whether the interval of the gain is too wide to be useful."""
    return doubling.gain.high - doubling.gain.low > WIDEST


def band(points: list[CurvePoint], fitted: FittedLaw) -> list[tuple[float, Estimate]]:
    """(workers, speed-up) by this law from the smallest point to twice the largest, including every measured number."""
    first, last = points[0].point, points[-1].point
    grid = np.geomspace(first.workers, 2 * last.workers, NUM_BAND_POINTS)
    places = sorted({*(float(p.point.workers) for p in points), *(round(float(n), 3) for n in grid)})
    known = log_throughputs([at.point for at in points])[0]
    noise = known.deviations[:NUM_FITS] * widening([known])
    at_last, last_draws = fitted.log_throughput(last.workers)
    found = []
    for workers in places:
        if workers <= last.workers:
            value, draws = fitted.log_throughput(workers)
        else:
            growth, grown = _growth(fitted, _loss(points), last.workers, workers)
            value, draws = at_last + growth, last_draws + grown
        shift = math.log(first.workers) - known.value
        found.append((workers, _estimate(value + shift, draws + shift - noise)))
    return found


def _growth(fitted: FittedLaw, loss: float, last: int, workers: float) -> tuple[float, Draws]:
    """Log ratio of throughput at `workers` to the last point's, by the law; the draws show its uncertainty."""
    at_last, last_draws = fitted.log_throughput(last)
    there, draws = fitted.log_throughput(workers)
    doublings = math.log2(workers / last)
    law_error = TWO_POINTS if len(fitted.measured.r) == 2 else MORE_POINTS
    doubt = law_error.at(loss=loss, held_out_error=fitted.held_out_error) * doublings
    return there - at_last, draws - last_draws + doubt * np.random.default_rng(_SEED).standard_normal(NUM_FITS)


def _loss(points: list[CurvePoint]) -> float:
    return min(1.0, max(0.0, 1.0 - points[-1].efficiency.value))


def _estimate(log_value: float, log_draws: Draws) -> Estimate:
    value = math.exp(log_value)
    ends = np.quantile(log_draws, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    low, high = np.exp(ends.clip(log_value - MOST_LOG, log_value + MOST_LOG))
    return Estimate(value, min(float(low), value), max(float(high), value))


def _drop(points: list[CurvePoint]) -> str:
    """Text on a throughput that falls with more workers beyond noise, or ""."""
    rates = log_throughputs([at.point for at in points])
    for number in range(1, len(points)):
        gain = rates[number].over(rates[number - 1])
        if gain.high < 1:
            fewer, more = points[number - 1].point.workers, points[number].point.workers
            text = f"{more} workers gave {to_text(gain)} the throughput of {fewer}"
            if number == len(points) - 1:
                return f"{text}: more workers are slower"
            return (
                f"{text}, which no curve explains: measure those points again, or check the placement of their workers"
            )
    return ""


def to_text(gain: Estimate) -> str:
    """A gain with its interval as text, such as `1.61x (1.52-1.70)`."""
    return f"{gain.value:.2f}x ({gain.low:.2f}-{gain.high:.2f})"
