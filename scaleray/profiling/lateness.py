"""Ranks that arrive late at the collectives of a step, and the layers in which the delay arises.

Phase timers cannot show this: a rank with a slow backward pass makes all others wait in theirs, so all measure the
same. The times at which each rank's gradients become ready do show it. Used by profiling/run_profile and
profiling/verdict; measured by training/profile/arrival_recording.py. All arrays have one row per step.
"""

import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scaleray.records.profile_record import Places, RankArrivals, Straggler

LEAST_STEPS = 8
"""Minimum number of steps for a statement on lateness; a sign test of two ranks needs a few more."""
MOST_BLOCKS = 30
"""Blocks of steps in a sign test: enough for thousands of ranks and places at once."""
ALIGNED_TOGETHER = 50
"""Rows over which two clocks are taken to run at the same rate; they drift apart by some 10 us per second."""


@dataclass(frozen=True)
class Arrivals:
    """Arrivals of all ranks on one clock. times: float64 (ranks, rows, moments), with the places of the forward pass,
    the start of the backward pass, and its places as moments; met: float64 (ranks, rows)."""

    ranks: tuple[int, ...]
    steps: np.ndarray
    places: Places
    times: np.ndarray
    met: np.ndarray

    @property
    def buckets(self) -> slice:
        """Moments that are places of the backward pass."""
        return slice(1 + len(self.places.forward), None)

    @property
    def first_ready(self) -> np.ndarray:
        """Time at which each rank reached the first collective of the backward pass, float64 (ranks, rows)."""
        first = [place for place, bucket in enumerate(self.places.buckets) if bucket == 0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a step without its gradient
            ready: np.ndarray = np.nanmax(self.times[:, :, self.buckets][:, :, first], axis=2)
        return ready

    @property
    def late(self) -> np.ndarray:
        """Seconds by which each rank arrived after the first one, float64 (ranks, rows, moments)."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a group that no rank used in a step
            late: np.ndarray = self.times - np.nanmin(self.times, axis=0)
        return late


def aligned(measured: Sequence[RankArrivals]) -> Arrivals | None:
    """Arrivals of at least two ranks on one clock, in steps measured by all of them; None if there are none.

    Clocks of different hosts and GPUs are aligned by the ends of the steps' common collectives, which reach all ranks
    simultaneously up to a message's latency.
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
    """Seconds that each rank waited for the slowest one in the collectives of its passes, float64 (ranks, rows)."""
    late = _filled(arrivals.late)
    behind = late.max(axis=0) - late
    last = _last_arrival(arrivals)
    stood_still = np.maximum(0.0, arrivals.met - last)
    if arrivals.places.meets_once:
        return np.minimum(np.maximum(0.0, last.max(axis=0) - last), stood_still)
    # at each collective, the wait grows by the slowest rank's additional delay since the previous one
    more = np.diff(behind, axis=2, prepend=0.0)
    return np.maximum(0.0, more).sum(axis=2)


def in_flight_s(arrivals: Arrivals) -> tuple[np.ndarray, np.ndarray]:
    """Seconds from the last rank's arrival at the first collective of a step to the end of the last collective, and the
    part of them after the last arrival; float64 (rows,) each. A link may have been idle between two collectives.
    """
    first = arrivals.first_ready.max(axis=0)
    last, met = _last_arrival(arrivals).max(axis=0), np.median(arrivals.met, axis=0)
    return np.maximum(0.0, met - first), np.maximum(0.0, met - last)


def find_stragglers(
    arrivals: Arrivals, *, step_s: float, least_share: float = 0.05, least_s: float = 0.001, alpha: float = 0.001
) -> list[Straggler]:
    """Ranks that lose at least `least_share` of a step and `least_s` at some place, worst first, each with the place of
    its largest loss. Delays below a millisecond come from a host's scheduler or rank 0's recording.

    A rank is not reported merely for being last: it must be later than the others in block after block of steps (a sign
    test, at level `alpha` for all ranks and places together), and by enough. Medians over blocks are used, so that a
    single pause of a machine has no effect, while a rank that is late in every tenth step of a long run is reported.
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
    """Increase of a rank's lateness from the previous place, beyond that of the others (ranks, rows, moments). A rank
    is not charged if others catch up by waiting."""
    grown = np.diff(_filled(arrivals.late), axis=2, prepend=0.0)
    others = (grown.sum(axis=0) - grown) / (len(arrivals.ranks) - 1)
    excess: np.ndarray = grown - np.maximum(0.0, others)
    return excess


def _filled(late: np.ndarray) -> np.ndarray:
    """Lateness, with gaps filled by a rank's value at the previous place."""
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
    """Probability of at least `positive` heads in `total` tosses of a fair coin."""
    return sum(math.comb(total, heads) for heads in range(positive, total + 1)) / 2**total


def _last_arrival(arrivals: Arrivals) -> np.ndarray:
    """Time at which the last gradient of each rank was ready (ranks, rows)."""
    last: np.ndarray = np.nanmax(arrivals.times, axis=2)
    return last


def _put_on_one_clock(times: np.ndarray, met: np.ndarray, clocks: Sequence[str]) -> None:
    """Shift times in place so that the ends of steps coincide on all clocks; times of ranks with the same clock
    stay."""
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
