"""Ranks that arrive late at the collectives of a step, and the layers in which the delay arose.

Timers of phases cannot show it: a rank that is slow in its backward pass makes all others wait in theirs, and all
measure the same. The moments at which each rank's gradients are ready can. Used by profiling/run_profile and
profiling/verdict; what is measured comes from training/profile/arrivals.py. All arrays have a row for each step.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scaleray.records.profile_record import Places, RankArrivals, Straggler

LEAST_STEPS = 8
"""Steps below which nothing is said of lateness; a sign test of two ranks needs a few more to be sure."""
MOST_BLOCKS = 30
"""Blocks of steps that a sign test looks at: enough for thousands of ranks and places at once."""
ALIGNED_TOGETHER = 50
"""Rows over which two clocks count as running alike: they drift apart by some 10 us a second."""


@dataclass(frozen=True)
class Arrivals:
    """The arrivals of all ranks on one clock. times: float64 (ranks, rows, moments), where the moments are the places
    of the forward pass, the begin of the backward pass, and its places; met: float64 (ranks, rows)."""

    ranks: tuple[int, ...]
    steps: np.ndarray
    places: Places
    times: np.ndarray
    met: np.ndarray

    @property
    def buckets(self) -> slice:
        """The moments that are places of the backward pass."""
        return slice(1 + len(self.places.forward), None)

    @property
    def first_ready(self) -> np.ndarray:
        """Time at which each rank came to the first collective of the backward pass, float64 (ranks, rows)."""
        first = [place for place, bucket in enumerate(self.places.buckets) if bucket == 0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a step without a gradient of it
            ready: np.ndarray = np.nanmax(self.times[:, :, self.buckets][:, :, first], axis=2)
        return ready

    @property
    def late(self) -> np.ndarray:
        """Seconds after the first rank at which each rank came, float64 (ranks, rows, moments)."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a group that no rank had in a step
            late: np.ndarray = self.times - np.nanmin(self.times, axis=0)
        return late


def aligned(measured: Sequence[RankArrivals]) -> Arrivals | None:
    """The arrivals of at least two ranks on one clock, in the steps that all have measured; None where they have
    nothing in common.

    Clocks of different hosts, and of GPUs, are put together by the ends of the steps' common collectives, which come
    to all ranks at the same time but for a message's latency.
    """
    if len(measured) < 2 or len({one.places for one in measured}) > 1:
        return None
    ranks = sorted(measured, key=lambda one: one.rank)
    steps = ranks[0].steps
    for one in ranks[1:]:
        steps = np.intersect1d(steps, one.steps)
    if not len(steps):
        return None
    times, met = [], []
    for one in ranks:
        rows = np.isin(one.steps, steps)
        begun = one.begun[rows]
        came = begun[:, None] + one.came[rows]
        times.append(np.insert(came, len(one.places.forward), begun, axis=1))
        met.append(begun + one.met[rows])
    both = np.stack(times), np.stack(met)
    _put_on_one_clock(*both, [one.clock for one in ranks])
    return Arrivals(tuple(one.rank for one in ranks), steps, ranks[0].places, *both)


def waited_s(arrivals: Arrivals) -> np.ndarray:
    """Seconds in which each rank waited for the slowest one in the collectives of its passes, float64 (ranks, rows)."""
    late = _filled(arrivals.late)
    behind = late.max(axis=0) - late
    last = _last_arrival(arrivals)
    stood_still = np.maximum(0.0, arrivals.met - last)
    if arrivals.places.meets_once:
        return np.minimum(np.maximum(0.0, last.max(axis=0) - last), stood_still)
    # each collective is waited for: whatever more the slowest is behind at it than at the one before
    more = np.diff(behind, axis=2, prepend=0.0)
    return np.maximum(0.0, more).sum(axis=2)


def in_flight_s(arrivals: Arrivals) -> tuple[np.ndarray, np.ndarray]:
    """Seconds from the moment when all ranks had come to the first collective of a step to the end of the last one,
    and those of them after the last arrival; float64 (rows,) each. Between two collectives a link may have been idle.
    """
    first = arrivals.first_ready.max(axis=0)
    last, met = _last_arrival(arrivals).max(axis=0), np.median(arrivals.met, axis=0)
    return np.maximum(0.0, met - first), np.maximum(0.0, met - last)


def find_stragglers(
    arrivals: Arrivals, *, step_s: float, least_share: float = 0.05, least_s: float = 0.001, alpha: float = 0.001
) -> list[Straggler]:
    """Ranks that lose at least `least_share` of a step and `least_s` somewhere, with the place where each loses most;
    the worst first. Less than a millisecond is what a host's scheduler, or rank 0's records, cost.

    No rank is named only for being the last: a rank must be later than the others in block after block of steps (a sign
    test, at the level `alpha` for all ranks and places together), and by enough. The median of blocks is what counts,
    so that one pause of a machine names no rank, while a rank that is late in each tenth step is named in a long run.
    """
    num_steps = len(arrivals.steps)
    if num_steps < LEAST_STEPS or step_s <= 0:
        return []
    blocks = _block_means(_excess(arrivals), min(MOST_BLOCKS, num_steps))
    tests = blocks.shape[0] * blocks.shape[2]
    found = []
    for number, rank in enumerate(arrivals.ranks):
        medians = np.median(blocks[number], axis=0)
        place = int(medians.argmax())
        p_value = min(1.0, tests * _sign_test(int((blocks[number, :, place] > 0).sum()), blocks.shape[1]))
        late_s = float(medians[place])
        share = late_s / step_s
        if share >= least_share and late_s >= least_s and p_value <= alpha:
            found.append(Straggler(rank, *_named(arrivals.places, place), late_s, share, num_steps, p_value))
    return sorted(found, key=lambda one: -one.late_s)


def _excess(arrivals: Arrivals) -> np.ndarray:
    """How much more late a rank is at each place than at the place before, beyond what the others are (ranks, rows,
    moments). A rank gains nothing here where others catch up by waiting."""
    grown = np.diff(_filled(arrivals.late), axis=2, prepend=0.0)
    others = (grown.sum(axis=0) - grown) / (len(arrivals.ranks) - 1)
    excess: np.ndarray = grown - np.maximum(0.0, others)
    return excess


def _filled(late: np.ndarray) -> np.ndarray:
    """Lateness in which a rank keeps what it had at the place before where it did not come by."""
    late = late.copy()
    for moment in range(late.shape[2]):
        before = late[:, :, moment - 1] if moment else 0.0
        late[:, :, moment] = np.where(np.isfinite(late[:, :, moment]), late[:, :, moment], before)
    return late


def _named(places: Places, moment: int) -> tuple[str, int | None, str]:
    """Phase, bucket and layers of a moment."""
    before = len(places.forward)
    if moment < before:
        return "forward", None, places.forward[moment]
    if moment == before:
        return "forward", None, places.end_of_forward
    place = moment - before - 1
    return "backward", places.buckets[place], places.backward[place]


def _block_means(values: np.ndarray, num_blocks: int) -> np.ndarray:
    """Means over blocks of rows (ranks, blocks, places)."""
    edges = np.linspace(0, values.shape[1], num_blocks + 1).astype(int)
    means = [values[:, begin:end].mean(axis=1) for begin, end in itertools.pairwise(edges)]
    return np.stack(means, axis=1)


def _sign_test(positive: int, total: int) -> float:
    """Probability of at least so many heads in `total` throws."""
    return sum(math.comb(total, heads) for heads in range(positive, total + 1)) / 2**total


def _last_arrival(arrivals: Arrivals) -> np.ndarray:
    """Time at which the last gradient of each rank was ready (ranks, rows)."""
    last: np.ndarray = np.nanmax(arrivals.times, axis=2)
    return last


def _put_on_one_clock(times: np.ndarray, met: np.ndarray, clocks: Sequence[str]) -> None:
    """Move times in place so that the ends of steps fall together for all clocks; within one clock nothing moves."""
    of_clock = {name: [i for i, clock in enumerate(clocks) if clock == name] for name in dict.fromkeys(clocks)}
    if len(of_clock) == 1:
        return
    reference, *others = of_clock.values()
    for begin in range(0, met.shape[1], ALIGNED_TOGETHER):
        rows = slice(begin, begin + ALIGNED_TOGETHER)
        ends = np.median(met[reference, rows], axis=0)
        for members in others:
            offset = float(np.median(np.median(met[members, rows], axis=0) - ends))
            times[members, rows] -= offset
            met[members, rows] -= offset
