"""Step time, throughput, speed-up and efficiency of measured points, with intervals that respect turns.

Steps of one turn share the state of the machine, so they are no independent measurements: the bootstrap resamples turns, and
then steps within each. The interval of a few turns is widened as Student's t is: for k turns the distance of every draw
from the estimate is multiplied by sqrt(k / (k - 1)) t(0.975, k - 1) / 1.96, which for 5 turns is 1.58 and for 2 is 9.2
(Hesterberg 2015, arXiv:1411.5279, section 5.4, does the same with percentiles). Everything is done on logarithms of times and
with a fixed seed: equal inputs give equal intervals.

Points are resampled independently of each other. Where rungs were measured in rounds, what all rungs of a round share
makes the intervals of ratios wider than they need be, never narrower.
"""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from scaleray.errors import UsageError
from scaleray.study_records import CurvePoint, Estimate, Point

NUM_DRAWS = 2000
CONFIDENCE = 0.95
MOST_STEPS = 400
"""A turn with more steps is resampled as so many of its quantiles, which bounds the work and cannot narrow an interval."""
NUM_BATCHES = 10
"""A turn that is alone is cut into so many consecutive batches, which stand for turns: neighbouring steps resemble each other."""
LEAST_BATCH = 4
"""Steps in a batch, at least."""

Turns = Sequence[Sequence[float]]
Draws = NDArray[np.float64]


def median_step_time(turns: Turns) -> Estimate:
    """Median over the steps of all turns in s, with its 95 % interval. Raises UsageError for times that are none."""
    return estimate(math.log(_median(turns)), log_step_time_draws(turns))


def throughput(turns: Turns, *, samples_per_step: float) -> Estimate:
    """Samples (or tokens) per s at the median step time."""
    log_rate = math.log(samples_per_step)
    return estimate(log_rate - math.log(_median(turns)), log_rate - log_step_time_draws(turns))


def ratio(turns: Turns, base: Turns) -> Estimate:
    """Median step time of `turns` over that of `base`: 1.04 is slower by 4 %."""
    value = math.log(_median(turns)) - math.log(_median(base))
    return estimate(value, log_step_time_draws(turns) - log_step_time_draws(base, number=1))


def curve_points(points: Sequence[Point]) -> list[CurvePoint]:
    """Points in order of workers beside the smallest one: throughput over the base's, as speed-up and as efficiency.

    The base has a speed-up of its own number of workers and an efficiency of 1, exactly.
    """
    base, *rest = sorted(points, key=lambda point: point.workers)
    known, one = float(base.workers), Estimate(1.0, 1.0, 1.0)
    found = [CurvePoint(point=base, speedup=Estimate(known, known, known), efficiency=one)]
    of_base, base_draws = log_throughput(base), log_throughput_draws(base)
    for point in rest:
        gain, draws = log_throughput(point) - of_base, log_throughput_draws(point) - base_draws
        speedup = estimate(gain + math.log(known), draws + math.log(known))
        n = point.workers
        efficiency = Estimate(speedup.value / n, speedup.low / n, speedup.high / n)
        found.append(CurvePoint(point=point, speedup=speedup, efficiency=efficiency))
    return found


def log_throughput(point: Point) -> float:
    """Logarithm of the samples per s at the median step time."""
    return math.log(point.global_batch_size) - math.log(_median(point.turns))


def log_throughput_draws(point: Point) -> Draws:
    """Draws of the same, (NUM_DRAWS,): independent of those of other numbers of workers."""
    return math.log(point.global_batch_size) - log_step_time_draws(point.turns, number=point.workers)


def log_step_time_draws(turns: Turns, *, number: int = 0) -> Draws:
    """Draws of the logarithm of the median step time, (NUM_DRAWS,), widened for few turns.

    number: another one for each of several measurements that must not be drawn alike.
    """
    value = math.log(_median(turns))  # checks them
    return _draws(tuple(tuple(turn) for turn in turns), number, value)


def estimate(log_value: float, log_draws: Draws) -> Estimate:
    """A value with the interval of its draws, both given as logarithms."""
    low, high = np.quantile(log_draws, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(math.exp(log_value), math.exp(min(low, log_value)), math.exp(max(high, log_value)))


def small_sample_factor(num_turns: int) -> float:
    """How much wider than the bootstrap's own an interval from so few turns must be."""
    if num_turns < 2:
        return 1.0
    students_t = float(stdtrit(num_turns - 1, (1 + CONFIDENCE) / 2))
    normal = float(stdtrit(1e9, (1 + CONFIDENCE) / 2))
    return math.sqrt(num_turns / (num_turns - 1)) * students_t / normal


@functools.lru_cache(maxsize=256)
def _draws(turns: tuple[tuple[float, ...], ...], number: int, value: float) -> Draws:
    groups = [_shortened(np.asarray(group)) for group in _groups([turn for turn in turns if turn])]
    lengths = np.array([len(group) for group in groups])
    table = np.zeros((len(groups), lengths.max()))
    for row, group in zip(table, groups, strict=True):
        row[: len(group)] = np.log(group)
    # content decides the seed too: two measurements must not be resampled in step because they are equally long
    random = np.random.default_rng([number, zlib.crc32(table.tobytes())])
    medians = np.empty(NUM_DRAWS)
    block = max(1, 2_000_000 // table.size)  # draws at once, which bounds the memory
    for start in range(0, NUM_DRAWS, block):
        size = min(block, NUM_DRAWS - start)
        chosen = random.integers(len(groups), size=(size, len(groups)))
        steps = (random.random((size, len(groups), table.shape[1])) * lengths[chosen][..., None]).astype(np.int64)
        drawn = table[chosen[..., None], steps]
        beyond = np.arange(table.shape[1]) >= lengths[chosen][..., None]
        drawn = np.where(beyond, np.nan, drawn) if beyond.any() else drawn
        flat = drawn.reshape(size, -1)
        medians[start : start + size] = np.nanmedian(flat, axis=1) if beyond.any() else np.median(flat, axis=1)
    draws: Draws = value + (medians - value) * small_sample_factor(len(groups))
    draws.setflags(write=False)
    return draws


def _groups(turns: Sequence[Sequence[float]]) -> list[Sequence[float]]:
    """What is resampled whole: the turns, or consecutive batches of the only one."""
    if len(turns) > 1:
        return list(turns)
    (steps,) = turns
    count = max(1, min(NUM_BATCHES, len(steps) // LEAST_BATCH))
    edges = [len(steps) * number // count for number in range(count + 1)]
    return [steps[first:last] for first, last in itertools.pairwise(edges)]


def _shortened(steps: NDArray[np.float64]) -> NDArray[np.float64]:
    if len(steps) <= MOST_STEPS:
        return steps
    shares = (np.arange(MOST_STEPS) + 0.5) / MOST_STEPS
    return np.asarray(np.quantile(steps, shares))


def _median(turns: Turns) -> float:
    steps = [step for turn in turns for step in turn]
    if not steps or not all(math.isfinite(step) and step > 0 for step in steps):
        found = next((step for step in steps if not (math.isfinite(step) and step > 0)), "none")
        raise UsageError("the step times of a point", found, "they must be seconds above 0, at least one")
    return float(np.median(steps))
