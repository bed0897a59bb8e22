"""Step time, throughput, speed-up and efficiency of measured points, with intervals that account for repeated
measurements.

Steps of one measurement (a "turn") share the state of the machine, so they are not independent: the bootstrap resamples
turns, and then steps within each. A few turns show little of the spread between turns, so the interval of k turns is
widened by sqrt(k / (k - 1)) t(0.975, v) / 1.96, v = k - 1 for one measurement (Hesterberg 2015, arXiv:1411.5279,
section 5.4, does the same with percentiles) and Welch's degrees of freedom for several. The steps' own noise is counted
in both stages, so that intervals are too wide rather than too narrow (Davison and Hinkley 1997, section 3.8).

Everything is done on logarithms of times and with fixed seeds: equal inputs give equal intervals. Measurements are
resampled independently of each other; points that were measured in the same rounds may be compared round by round
(`rounds`)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit

from scaleray.errors import UsageError
from scaleray.records.study_record import CurvePoint, Estimate, Point
from scaleray.studies.curves.paired_rounds import repeats_by_round, without_drift

NUM_DRAWS = 2000
CONFIDENCE = 0.95
MOST_STEPS = 400
"""Maximum number of resampled steps of a turn. A longer turn is represented by this many quantiles, which bounds the
work and cannot narrow an interval."""
NUM_BATCHES = 10
"""Number of consecutive batches into which a single turn is divided. They are resampled as a whole, since neighbouring
steps correlate."""
LEAST_BATCH = 4
"""Smallest number of steps in a batch."""
WORTH_PAIRING = 0.5
"""Largest width of the paired intervals, relative to the unpaired ones, at which pairing is used. Choosing the narrower
interval would favour intervals that are narrow by chance: for normal turns and 3 to 10 rounds such a choice covers 93 %
if rounds share nothing; this rule covers 94 % or more in any case."""
MOST_LOG = 100.0
"""Largest distance of an interval's end from its value, as the logarithm of a ratio: a few short turns may leave open
more than any measurable value."""

Turns = Sequence[Sequence[float]]
Draws = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Resampled:
    """Logarithm of a measured quantity, and deviations of its bootstrap draws, before widening for few turns."""

    value: float
    deviations: Draws
    """Differences of the bootstrap draws from `value`, (NUM_DRAWS,)."""
    degrees_of_freedom: float
    is_paired: bool = False
    """Whether the turns were drawn together with those of the curve's other points."""

    def estimate(self) -> Estimate:
        """The quantity with its interval."""
        return estimate(self.value, self.deviations * widening([self]))

    def over(self, other: Resampled) -> Estimate:
        """The quantity as a multiple of another."""
        return estimate(self.value - other.value, (self.deviations - other.deviations) * widening([self, other]))


def median_step_time(turns: Turns) -> Estimate:
    """Median over the steps of all turns in s, with its 95 % interval. Raises UsageError for times that are not finite
    and above 0, or missing."""
    return resampled(turns).estimate()


def throughput(turns: Turns, *, samples_per_step: float) -> Estimate:
    """Samples (or tokens) per s at the median step time."""
    return _rate(resampled(turns), samples_per_step).estimate()


def ratio(turns: Turns, base: Turns) -> Estimate:
    """Median step time of `turns` over that of `base`: 1.04 is slower by 4 %."""
    return resampled(turns, number=1).over(resampled(base))


def curve_points(points: Sequence[Point]) -> list[CurvePoint]:
    """Points in order of workers, compared with the smallest one: throughput over the base's, as speed-up and as
    efficiency.

    The base has a speed-up of its own number of workers and an efficiency of 1, exactly. If points are compared round
    by round, a speed-up is not exactly the ratio of the points' own throughputs."""
    base, *rest = sorted(points, key=lambda point: point.workers)
    known, one = float(base.workers), Estimate(1.0, 1.0, 1.0)
    found = [CurvePoint(point=base, speedup=Estimate(known, known, known), efficiency=one)]
    rates = log_throughputs([base, *rest])
    for point, rate in zip(rest, rates[1:], strict=True):
        gain = rate.over(rates[0])
        found.append(
            CurvePoint(point=point, speedup=scaled(gain, known), efficiency=scaled(gain, known / point.workers))
        )
    return found


def log_throughputs(points: Sequence[Point]) -> list[Resampled]:
    """Logarithms of the samples per s at the median step time of the points of a curve, the first of which is its base.

    The points are compared round by round if all were measured in the same rounds and that makes the intervals of their
    ratios at most `WORTH_PAIRING` as wide; otherwise they are drawn independently. Pairs of few rounds have half the
    degrees of freedom, so pairing is a disadvantage if rounds share nothing."""
    apart = [_log_throughput(point, point.turns) for point in points]
    turns = repeats_by_round(points)
    if turns is None:
        return apart
    paired = [_log_throughput(p, own, is_paired=True) for p, own in zip(points, without_drift(turns), strict=True)]
    return paired if _width_of_ratios(paired) <= WORTH_PAIRING * _width_of_ratios(apart) else apart


def _width_of_ratios(rates: Sequence[Resampled]) -> float:
    gains = [rate.over(rates[0]) for rate in rates[1:]]
    return sum(math.log(gain.high / gain.low) for gain in gains)


def _log_throughput(point: Point, turns: Turns, *, is_paired: bool = False) -> Resampled:
    return _rate(resampled(turns, number=point.workers, is_paired=is_paired), point.global_batch_size)


def resampled(turns: Turns, *, number: int = 0, is_paired: bool = False) -> Resampled:
    """The median step time with its bootstrap draws. number: distinct for each of several measurements, so that their
    draws differ. is_paired: draw turns together with other paired points, which must have equally many in the same
    order of rounds.

    Raises UsageError for times that are not finite and above 0, or missing."""
    steps = [step for turn in turns for step in turn]
    if not steps or not all(math.isfinite(step) and step > 0 for step in steps):
        found = next((step for step in steps if not (math.isfinite(step) and step > 0)), "none")
        raise UsageError.problem("the step times of a point", f"must be positive seconds, at least one, not {found}")
    return _resampled(tuple(tuple(turn) for turn in turns if turn), number, NUM_DRAWS, is_paired)


def estimate(log_value: float, log_deviations: Draws) -> Estimate:
    """A value with the interval of its draws. log_value: logarithm of the value; log_deviations:
    differences of its draws from it."""
    low, high = np.quantile(log_deviations, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]).clip(-MOST_LOG, MOST_LOG)
    return Estimate(math.exp(log_value), math.exp(log_value + min(low, 0.0)), math.exp(log_value + max(high, 0.0)))


def scaled(given: Estimate, factor: float) -> Estimate:
    """An estimate times a positive number that is known exactly."""
    return Estimate(given.value * factor, given.low * factor, given.high * factor)


def widening(parts: Sequence[Resampled]) -> float:
    """Factor by which an interval from these measurements is wider than the normal distribution's.

    Student's t over the normal quantile, with the degrees of freedom of Welch and Satterthwaite, or of the number of
    rounds."""
    if len(parts) > 1 and all(part.is_paired for part in parts):
        return _over_normal(min(part.degrees_of_freedom for part in parts))
    variances = [float(np.var(part.deviations)) for part in parts]
    doubt = sum(v**2 / part.degrees_of_freedom for v, part in zip(variances, parts, strict=True))
    if doubt == 0:
        return 1.0
    return _over_normal(sum(variances) ** 2 / doubt)


def _over_normal(degrees_of_freedom: float) -> float:
    return float(stdtrit(degrees_of_freedom, (1 + CONFIDENCE) / 2) / ndtri((1 + CONFIDENCE) / 2))


def _rate(step_time: Resampled, samples_per_step: float) -> Resampled:
    log_rate = math.log(samples_per_step) - step_time.value
    return dataclasses.replace(step_time, value=log_rate, deviations=-step_time.deviations)


@functools.lru_cache(maxsize=128)
def _resampled(turns: tuple[tuple[float, ...], ...], number: int, num_draws: int, is_paired: bool) -> Resampled:
    is_alone = len(turns) == 1
    groups = _batches(turns[0]) if is_alone else [_shortened(np.array(turn)) for turn in turns]
    num_groups, lengths = len(groups), np.array([len(group) for group in groups])
    table = np.full((num_groups, lengths.max()), np.nan)
    for row, group in zip(table, groups, strict=True):
        row[: len(group)] = np.log(group)
    value = math.log(np.median([step for turn in turns for step in turn]))
    # content decides the seed too: two measurements must not be resampled in step because they are equally long
    random = np.random.default_rng([number, zlib.crc32(table.tobytes())])
    choose = np.random.default_rng(num_groups) if is_paired else random
    every_choice = choose.integers(num_groups, size=(num_draws, num_groups))
    medians = np.empty(num_draws)
    block = max(1, 2_000_000 // table.size)  # draws at once, which bounds the memory
    for start in range(0, num_draws, block):
        size = min(block, num_draws - start)
        chosen = every_choice[start : start + size]
        drawn = table[chosen]
        if not is_alone or num_groups == 1:
            steps = (random.random(drawn.shape) * lengths[chosen][..., None]).astype(np.int64)
            drawn = np.where(np.isnan(drawn), np.nan, table[chosen[..., None], steps])
        flat = drawn.reshape(size, -1)
        medians[start : start + size] = np.nanmedian(flat, axis=1) if np.isnan(flat).any() else np.median(flat, axis=1)
    deviations: Draws = (medians - value) * (math.sqrt(num_groups / (num_groups - 1)) if num_groups > 1 else 1.0)
    deviations.setflags(write=False)
    return Resampled(value, deviations, num_groups - 1 if num_groups > 1 else max(1, len(turns[0]) - 1), is_paired)


def _batches(steps: Sequence[float]) -> list[NDArray[np.float64]]:
    """Consecutive batches of steps, as equal in length as possible."""
    count = max(1, min(NUM_BATCHES, len(steps) // LEAST_BATCH))
    edges = [len(steps) * number // count for number in range(count + 1)]
    return [np.array(steps[first:last]) for first, last in itertools.pairwise(edges)]


def _shortened(steps: NDArray[np.float64]) -> NDArray[np.float64]:
    if len(steps) <= MOST_STEPS:
        return steps
    shares = (np.arange(MOST_STEPS) + 0.5) / MOST_STEPS
    return np.asarray(np.quantile(steps, shares))
