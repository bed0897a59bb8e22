"""Tests of two means with three answers, their power, and the number of runs needed.

Each test asks whether a candidate is worse than a baseline by less than a margin: non-inferiority (FDA, Non-Inferiority
Clinical Trials to Establish Effectiveness, 2016), and equivalence by two one-sided tests (Schuirmann 1987). A relative
margin is a linear contrast of the two means, so that the baseline's own noise counts (Sasabuchi 1988; Hauschke et al.
1999). Variances may differ: the statistic is Welch's, with the degrees of freedom of the side with fewer runs.

The error probability of each one-sided test is at most `alpha` = 5 % at its margin, for noise that is normal or as
skewed as an exponential distribution, with unequal deviations and numbers of runs, and for successive runs with a
correlation of neighbours of at most 0.3 (`Contrast`). jobs/benchmarks/gates.py simulates these cases; docs/gates.md has
the figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy.special import stdtr, stdtrit
from scipy.stats import nct

from scaleray.records.gate_answer import Answer

ALPHA = 0.05
POWER = 0.9
"""Power for computing the needed runs: a candidate as good as the baseline passes 9 times out of 10."""
MOST_RUNS = 1000
"""Largest number of runs considered; beyond it the margin is too narrow for the noise."""
SKEWED = 0.7
"""Multiple of (2 t^2 + 1) / sqrt(n) that is added to a critical value t of n runs. The first-order term of Edgeworth's
expansion of a studentised mean (Hall 1992, section 2.6) is skewness / 6, 0.33 for exponential noise; 3 to 30 of such
runs take up to 0.61 by simulation."""
UNEQUAL = 1.5
"""Multiple of that term for two sides, since the noisier side is known only from estimated deviations."""
SUCCESSIVE = math.sqrt(2)
"""Multiple of a critical value for successive runs: with a correlation of neighbours of 1/3 they count as half as
many."""
Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Runs:
    """Mean, standard deviation (of a sample, n - 1) and number of repeated runs."""

    mean: float
    stdev: float
    number: int
    are_successive: bool = False
    """Whether successive runs correlate, as the speeds of runs on one machine do."""

    def repeated(self, number: int) -> Runs:
        """The same mean and noise with another number of runs."""
        return replace(self, number=number)

    @classmethod
    def of(cls, values: Sequence[float], *, resolution: float = 0.0, are_successive: bool = False) -> Runs:
        """Runs with these values. resolution: smallest visible difference between values, such as the samples between
        two evaluations. Runs with equal values are assumed to differ by rounding: resolution / sqrt(12)."""
        spread = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
        stdev = max(spread, resolution / math.sqrt(12)) if len(values) > 1 else math.nan
        return cls(float(np.mean(values)), stdev, len(values), are_successive)


@dataclass(frozen=True)
class Margin:
    """Largest amount by which a candidate may be worse: absolute, or a share of the baseline's mean."""

    size: float
    is_relative: bool

    def factor(self, better: Better) -> float:
        """Multiple of the baseline's mean that is the margin's limit; 1 for an absolute margin."""
        if not self.is_relative:
            return 1.0
        return 1 - self.size if better == "higher" else 1 + self.size

    def amount(self, baseline: float) -> float:
        """The margin in the unit of the means."""
        return self.size * abs(baseline) if self.is_relative else self.size


@dataclass(frozen=True)
class MarginTest:
    """Test of one margin. worse: the candidate's mean minus the baseline's, above 0 if it is worse."""

    answer: Answer
    worse: float
    low: float
    high: float
    """Interval of `worse` from `low` to `high`, each end with confidence 1 - alpha."""
    p_value: float
    """Probability of such runs if the candidate is worse by exactly the margin."""


def not_worse(
    candidate: Runs, baseline: Runs, margin: Margin, *, better: Better, alpha: float = ALPHA
) -> MarginTest | None:
    """Whether the candidate is worse by less than the margin: `pass` if this is proven, `fail` if it is proven worse by
    more. None if a side has fewer than two runs, whose noise is unknown."""
    if min(candidate.number, baseline.number) < 2:
        return None
    sign, factor = (1 if better == "lower" else -1), margin.factor(better)
    beyond = sign * (candidate.mean - factor * baseline.mean) - (0.0 if margin.is_relative else margin.size)
    worse = sign * (candidate.mean - baseline.mean)
    contrast = Contrast.of(candidate, baseline, factor)
    if contrast.error == 0:  # nothing moves at all: the means are known exactly
        answer: Answer = "pass" if beyond < 0 else "fail"
        return MarginTest(answer, worse, worse, worse, float(beyond >= 0))
    p_value, p_beyond = contrast.chance(-beyond), contrast.chance(beyond)
    half = Contrast.of(candidate, baseline, 1.0).half_width(alpha)
    answer = "pass" if p_value <= alpha else "fail" if p_beyond <= alpha else "inconclusive"
    return MarginTest(answer, worse, worse - half, worse + half, p_value)


def equal(
    candidate: Runs, baseline: Runs, margin: Margin, *, better: Better, alpha: float = ALPHA
) -> MarginTest | None:
    """Whether the candidate is neither worse nor better by the margin: two one-sided tests, each at `alpha`. None if a
    side has fewer than two runs."""
    worse = not_worse(candidate, baseline, margin, better=better, alpha=alpha)
    best = not_worse(candidate, baseline, margin, better=_turned(better), alpha=alpha)
    if worse is None or best is None:
        return None
    answers = {worse.answer, best.answer}
    answer: Answer = "fail" if "fail" in answers else "inconclusive" if "inconclusive" in answers else "pass"
    return MarginTest(answer, worse.worse, worse.low, worse.high, max(worse.p_value, best.p_value))


def power(candidate: Runs, baseline: Runs, margin: Margin, *, better: Better, alpha: float = ALPHA) -> float:
    """Probability that runs with this noise are proven not worse if the true means are equal, from a noncentral t
    distribution."""
    contrast = Contrast.of(candidate, baseline, margin.factor(better), is_expected=True)
    if contrast.error == 0:
        return 1.0
    return contrast.power(margin.amount(baseline.mean), alpha)


def power_of_both(candidate: Runs, baseline: Runs, margin: Margin, *, better: Better, alpha: float = ALPHA) -> float:
    """Lower bound on the probability that `equal` passes if the true means are equal: the sum of both tests' errors."""
    ways = (better, _turned(better))
    return max(0.0, sum(power(candidate, baseline, margin, better=way, alpha=alpha) for way in ways) - 1)


def above(runs: Runs, limit: float, *, alpha: float = ALPHA) -> tuple[Answer, float, float]:
    """Whether a mean is above a limit: `pass` if all of its interval is, `fail` if none of it is, else `inconclusive`.
    Also returns both ends of the interval, each with confidence 1 - alpha. Needs at least two runs."""
    half = Contrast.of_one(runs).half_width(alpha)
    low, high = runs.mean - half, runs.mean + half
    return "pass" if low > limit else "fail" if high < limit else "inconclusive", low, high


def power_above(runs: Runs, limit: float, *, alpha: float = ALPHA) -> float:
    """Probability that this many runs with this mean and noise prove the mean is above the limit."""
    if runs.stdev == 0:
        return float(runs.mean > limit)
    return Contrast.of_one(runs).power(runs.mean - limit, alpha)


def runs_needed_above(runs: Runs, limit: float, *, alpha: float = ALPHA) -> int | None:
    """Smallest number of runs with this mean and noise that prove the mean above the limit 9 times out of 10; None if
    the mean is not above it, or MOST_RUNS are too few."""
    if runs.mean <= limit:
        return None
    return runs_needed(lambda n: n > 1 and power_above(runs.repeated(n), limit, alpha=alpha) >= POWER)


def runs_needed(enough: Callable[[int], bool]) -> int | None:
    """Smallest number of runs of each side from which any number suffices; None: more than MOST_RUNS."""
    if not enough(MOST_RUNS):
        return None
    low, high = 1, MOST_RUNS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


@dataclass(frozen=True)
class Contrast:
    """Noise of a mean, or of candidate - factor * baseline: its standard error, and the excess over Student's t that is
    required of the difference.

    If the spread of a few skewed runs is small by chance, their mean is often far from the truth, while t treats it as
    certain: by Welch's test, 15 % of sets of 5 exponential runs pass at the margin if the other side has little noise.
    Successive runs that correlate by 0.3 pass 10 %. Skewed noise of successive runs is not covered."""

    error: float
    freedom: float
    skewness: float
    """Weight of a run's skewness in the skewness of the standardised mean: 1 / sqrt(n) for one side of n runs."""
    are_successive: bool

    @classmethod
    def of_one(cls, runs: Runs) -> Contrast:
        """Noise of one mean."""
        root = math.sqrt(runs.number)
        return cls(runs.stdev / root, runs.number - 1, 1 / root, runs.are_successive)

    @classmethod
    def of(cls, candidate: Runs, baseline: Runs, factor: float, *, is_expected: bool = False) -> Contrast:
        """Noise of two sides. is_expected: the deviations are the true ones, from which measured ones differ by
        chance."""
        runs = candidate, baseline
        stdevs = candidate.stdev, factor * baseline.stdev
        fewest, num = min(candidate.number, baseline.number), (candidate.number, baseline.number)
        apart = 0.6 * math.sqrt(sum(1 / 2 / (one.number - 1) for one in runs)) if is_expected and fewest > 1 else 0.0
        by = math.exp(apart / 2)
        weights = [_skewness(num, (stdevs[0] * by, stdevs[1] / by)), _skewness(num, (stdevs[0] / by, stdevs[1] * by))]
        skewness = min(UNEQUAL * max(*weights, _skewness(num, (1.0, factor))), 1 / math.sqrt(fewest))
        error = math.hypot(*(stdev / math.sqrt(one.number) for stdev, one in zip(stdevs, runs, strict=True)))
        return cls(error, fewest - 1, skewness, any(one.are_successive for one in runs))

    def half_width(self, alpha: float) -> float:
        """Largest distance of the difference from its true value, with probability 1 - alpha on either side."""
        return self.critical(alpha) * self.error if self.error else 0.0

    def critical(self, alpha: float) -> float:
        """Critical value: smallest significant multiple of the error. alpha: probability of larger ones, below 0.5."""
        t = float(stdtrit(self.freedom, 1 - alpha))
        return max(t + SKEWED * self.skewness * (2 * t**2 + 1), self._wider * t)

    def chance(self, distance: float) -> float:
        """The largest alpha whose critical value is beyond this distance."""
        away, more = distance / self.error, SKEWED * self.skewness
        t = away - more
        if t > 0 and more:
            t = (math.sqrt(1 + 8 * more * t) - 1) / 4 / more
        return float(stdtr(self.freedom, -min(t, away / self._wider)))

    def power(self, distance: float, alpha: float) -> float:
        """Probability of a difference beyond the critical value if the truth is this distance."""
        return float(nct.sf(self.critical(alpha), self.freedom, distance / self.error))

    @property
    def _wider(self) -> float:
        return SUCCESSIVE if self.are_successive else 1.0


def _skewness(numbers: tuple[int, int], stdevs: tuple[float, float]) -> float:
    """Skewness of the standardised difference of two means if each run's is 1."""
    thirds = [stdev**3 / number**2 for stdev, number in zip(stdevs, numbers, strict=True)]
    variance = sum(stdev**2 / number for stdev, number in zip(stdevs, numbers, strict=True))
    return abs(thirds[0] - thirds[1]) / variance**1.5 if variance else 0.0


def _turned(better: Better) -> Better:
    return "higher" if better == "lower" else "lower"


BEYOND = 0.025

"""Probability of efficiencies beyond either end of the interval."""
