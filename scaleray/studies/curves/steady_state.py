"""Which steps of a run count: the end of its warm-up, and whether later steps are steady.

The rule: steps are grouped in batches of 5, each represented by its median, so single slow steps do not matter. The
warm-up ends at the first batch after which the squared standard error of the remaining batches' mean is within 5 % of
its minimum (MSER-5: White 1997, Simulation 69(6):323-334), after at least 3 steps and at most half of all steps, and
leaves 20 steps if possible. The rest is steady unless

- it drifts: it rises or falls more than chance explains (Kendall's tau, p < 0.01), by more than 3 % from end to end
  on the Theil-Sen line; or
- the warm-up lasts longer than half of the steps: the rule places its end at the halfway point, and the last batch
  before that point is still more than 3 % and 3 standard deviations off; or
- there are fewer than 20 steps after the warm-up: too few to tell."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BATCH = 5
LEAST_WARMUP = 3
"""Minimum warm-up in steps: a process allocates in its first step and fills caches in the second and third, regardless
of their times."""
LEAST_STEPS = 20
"""Minimum number of steps after the warm-up for a drift to be visible."""
CHANCE = 0.01
MOST_DRIFT = 0.03
NEARLY_BEST = 1.05
"""Largest squared standard error of the remaining batches' mean, relative to the smallest, at which an end of the
warm-up counts as equally good; the earliest of these is used."""
NUM_DRIFT_BATCHES = 40
"""Number of batches for detecting a drift: long ones, since neighbouring steps are similar."""
MOST_BATCHES = 400
"""Approximate number of batches of a long run in the search for the end of the warm-up: longer runs get longer batches,
so that the work stays small."""


@dataclass(frozen=True)
class SteadyState:
    """End of the warm-up, and whether the steps after it are steady.

    first: index of the first step that counts, from 0. drift: relative change of the step time from there to the end.
    """

    first: int
    is_steady: bool
    drift: float
    why: str
    """Reason why the steps are not steady, or ""."""


def steady_state(step_times_s: Sequence[float]) -> SteadyState:
    """Find the end of the warm-up in these step times, and whether the rest is steady; see the rule above.

    step_times_s: step times in s, in order. Any number of steps is allowed; without steps nothing counts."""
    times = np.asarray(step_times_s, dtype=np.float64)
    count = len(times)
    if count == 0:
        return SteadyState(0, False, 0.0, "there are no steps")
    earliest = min(LEAST_WARMUP, count // 2)
    latest = max(earliest, min(count // 2, count - LEAST_STEPS))
    first, is_settled = _end_of_warmup(times, earliest, latest)
    rest = times[first:]
    if len(rest) < LEAST_STEPS:
        return SteadyState(
            first, False, 0.0, f"{len(rest)} steps after the warm-up are too few; {LEAST_STEPS} are needed"
        )
    drift, chance = _drift(rest)
    if not is_settled:
        return SteadyState(first, False, drift, f"step times had not settled after half of the {count} steps")
    if chance < CHANCE and abs(drift) > MOST_DRIFT:
        way = "rise" if drift > 0 else "fall"
        return SteadyState(first, False, drift, f"after the warm-up, step times still {way} by {abs(drift):.0%}")
    return SteadyState(first, True, drift, "")


def _end_of_warmup(times: NDArray[np.float64], earliest: int, latest: int) -> tuple[int, bool]:
    """(first step that counts, whether the warm-up ended before `latest`)."""
    size = max(BATCH, len(times) // MOST_BATCHES)
    medians = _batch_medians(times[earliest:], size)
    num_ends = min(len(medians) - 1, (latest - earliest) // size) + 1  # a batch at least stays
    if num_ends < 2 or len(medians) < 4:
        return earliest, True
    errors = np.array([np.var(medians[end:]) / (len(medians) - end) for end in range(num_ends)])
    end = int(np.argmax(errors <= NEARLY_BEST * errors.min()))
    if end < num_ends - 1:
        return earliest + end * size, True
    rest, last = medians[end:], medians[end - 1]
    off, spread = abs(last - np.median(rest)), 1.4826 * np.median(np.abs(rest - np.median(rest)))
    return earliest + end * size, bool(off <= max(MOST_DRIFT * np.median(rest), 3 * spread))


def _drift(times: NDArray[np.float64]) -> tuple[float, float]:
    """(relative change from the first to the last batch on the Theil-Sen line, probability that it is chance)."""
    from scipy import stats  # slow to import, and only measured runs need it

    medians = _batch_medians(times, max(1, len(times) // NUM_DRIFT_BATCHES))
    numbers = np.arange(len(medians))
    chance = float(stats.kendalltau(numbers, medians).pvalue)
    slope = float(stats.theilslopes(medians, numbers).slope)
    return slope * (len(medians) - 1) / float(np.median(medians)), 1.0 if math.isnan(chance) else chance


def _batch_medians(times: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Medians of consecutive batches of `size` steps; steps at the end that do not fill a batch are omitted."""
    whole = len(times) // size * size
    return np.asarray(np.median(times[:whole].reshape(-1, size), axis=1))
