"""Who comes late to the collectives of a step, and in which layers the delay was born.

Timers of phases cannot tell: a rank that is slow in its backward pass makes all others wait in theirs, and all measure
the same. The moments at which each rank's gradients are ready can. Used by profiling/run_profile and
profiling/verdict; what is measured comes from training/profile/arrivals.py. All arrays have a row for each step.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

LEAST_STEPS = 8
"""Steps below which nothing is said of lateness; a sign test of two ranks needs a few more to be sure."""
MOST_BLOCKS = 30
"""Blocks of steps that a sign test looks at: enough for thousands of ranks and places at once."""
ALIGNED_TOGETHER = 50
"""Rows over which two clocks count as running alike: they drift apart by some 10 us a second."""


@dataclass(frozen=True)
class Places:
    """Collectives of a step at which arrivals are measured, in the order in which a rank comes to them."""

    forward: tuple[str, ...]
    """Layers that a rank computed before each place of the forward pass; empty where there were none."""
    backward: tuple[str, ...]
    """Layers of the gradients that each collective of the backward pass carries."""
    meets_once: bool
    """Whether a rank goes on computing while collectives run, and waits for all of them at the end of the pass, as in
    DDP; else it waits for each, as in FSDP."""
    end_of_forward: str = ""
    """Layers that a rank computes between the last place of the forward pass and the begin of the backward pass; empty
    where that is the whole forward pass and more."""


@dataclass(frozen=True)
class RankArrivals:
    """When the gradients of one rank were ready for their collectives, in seconds on the clock of its host."""

    rank: int
    clock: str
    """Name of the clock. Times of ranks with the same one can be compared as they are."""
    places: Places
    num_steps: int
    """Steps that were measured; of these, some have a row."""
    steps: np.ndarray = field(repr=False, compare=False)
    """Numbers of the steps that have a row, int64 (rows,)."""
    begun: np.ndarray = field(repr=False, compare=False)
    """Begin of the last backward pass, float64 (rows,)."""
    came: np.ndarray = field(repr=False, compare=False)
    """Seconds from there to the arrival at each place, negative in the forward pass, float32 (rows, places); NaN where
    a step did not come by."""
    met: np.ndarray = field(repr=False, compare=False)
    """Seconds from there until the collectives of the pass had ended, float32 (rows,)."""


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
    def late(self) -> np.ndarray:
        """Seconds after the first rank at which each rank came, float64 (ranks, rows, moments)."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a group that no rank had in a step
            late: np.ndarray = self.times - np.nanmin(self.times, axis=0)
        return late


@dataclass(frozen=True)
class Straggler:
    """A rank that makes the others wait, step after step."""

    rank: int
    phase: str
    """`forward` or `backward`: the pass in which it loses its time, as far as its arrivals tell. A delay from before
    the forward pass counts as one of its begin."""
    bucket: int | None
    """Collective of the backward pass that was the first to be late, from 0 for the last layers; None in the forward
    pass."""
    layers: str
    """Layers in which the time is lost; empty where it may be anywhere between two steps' backward passes."""
    late_s: float
    """Seconds that a step adds to its lateness there: the median of blocks of steps."""
    share: float
    """The same as a share of a step."""
    steps: int
    """Number of steps that were looked at."""
    p_value: float
    """Probability that ranks of the same speed show this somewhere."""


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
    behind = np.nan_to_num(np.nanmax(arrivals.late, axis=0) - arrivals.late)
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
    first = np.nanmin(arrivals.times[:, :, arrivals.buckets], axis=2).max(axis=0)
    last, met = _last_arrival(arrivals).max(axis=0), np.median(arrivals.met, axis=0)
    return np.maximum(0.0, met - first), np.maximum(0.0, met - last)


def find_stragglers(
    arrivals: Arrivals, *, step_s: float, least_share: float = 0.05, alpha: float = 0.001
) -> list[Straggler]:
    """Ranks that lose at least `least_share` of a step somewhere, with the place where each loses most; the worst
    first.

    Nobody is named for being the last: a rank must be later than the others in block after block of steps (a sign
    test, at the level `alpha` for all ranks and places together), and by enough. The median of blocks is what counts,
    so that one pause of a machine names nobody, while a rank that is late in each tenth step is named in a long run.
    """
    num_steps = len(arrivals.steps)
    if num_steps < LEAST_STEPS or step_s <= 0:
        return []
    blocks = _block_means(_excess(arrivals), min(MOST_BLOCKS, num_steps))
    tests = blocks.shape[0] * blocks.shape[2]
    found = []
    for number, rank in enumerate(arrivals.ranks):
        medians = np.nan_to_num(np.nanmedian(blocks[number], axis=0))
        place = int(medians.argmax())
        seen = blocks[number, :, place]
        seen = seen[np.isfinite(seen)]
        p_value = min(1.0, tests * _sign_test(int((seen > 0).sum()), len(seen)))
        late_s = float(medians[place])
        share = late_s / step_s
        if share >= least_share and p_value <= alpha:
            found.append(Straggler(rank, *_named(arrivals.places, place), late_s, share, num_steps, p_value))
    return sorted(found, key=lambda one: -one.late_s)


def _excess(arrivals: Arrivals) -> np.ndarray:
    """How much more late a rank is at each place than at the place before, beyond what the others are (ranks, rows,
    moments). A rank gains nothing here where others catch up by waiting."""
    grown = np.diff(arrivals.late, axis=2, prepend=0.0)
    others = (np.nansum(grown, axis=0) - np.nan_to_num(grown)) / (len(arrivals.ranks) - 1)
    excess: np.ndarray = grown - np.maximum(0.0, others)
    return excess


def _named(places: Places, moment: int) -> tuple[str, int | None, str]:
    """Phase, bucket and layers of a moment."""
    before = len(places.forward)
    if moment < before:
        return "forward", None, places.forward[moment]
    if moment == before:
        return "forward", None, places.end_of_forward
    return "backward", moment - before - 1, places.backward[moment - before - 1]


def _block_means(values: np.ndarray, num_blocks: int) -> np.ndarray:
    """Means over blocks of rows (ranks, blocks, places)."""
    edges = np.linspace(0, values.shape[1], num_blocks + 1).astype(int)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a group without a gradient in a whole block
        means = [np.nanmean(values[:, begin:end], axis=1) for begin, end in itertools.pairwise(edges)]
    return np.stack(means, axis=1)


def _sign_test(positive: int, total: int) -> float:
    """Probability of at least so many heads in `total` throws."""
    return sum(math.comb(total, heads) for heads in range(positive, total + 1)) / 2**total if total else 1.0


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
