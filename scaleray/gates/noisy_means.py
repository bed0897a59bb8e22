"""Tests of two means with three answers, how likely they are to pass, and how many runs that takes.

Each asks whether a candidate is worse than a baseline by less than a margin: non-inferiority (FDA, Non-Inferiority
Clinical Trials to Establish Effectiveness, 2016), and equivalence by two one-sided tests (Schuirmann 1987). A relative
margin is a linear contrast of the two means, so that the baseline's own noise counts (Sasabuchi 1988; Hauschke et al.
1999). Variances may differ: the test is Welch's, with fewer degrees of freedom where one side is small (`_error`).
Each one-sided test errs with at most `alpha` at its margin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import stdtr, stdtrit
from scipy.stats import nct

from scaleray.gates.answer import Answer

ALPHA = 0.05
POWER = 0.9
"""Power that the number of needed runs aims at: a candidate as good as the baseline passes 9 times of 10."""
MOST_RUNS = 1000
"""Largest number of runs that is looked at; beyond it the margin is too narrow for the noise."""
Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Runs:
    """Mean, standard deviation (of a sample, n - 1) and number of repeated runs."""

    mean: float
    stdev: float
    number: int

    def repeated(self, number: int) -> Runs:
        """The same mean and noise over another number of runs."""
        return Runs(self.mean, self.stdev, number)

    @classmethod
    def of(cls, values: Sequence[float], *, resolution: float = 0.0) -> Runs:
        """The runs with these values. resolution: the step in which a value can be seen, such as the samples between
        two evaluations: where all runs fall into one step, they still differ by its rounding, resolution / sqrt(12)."""
        spread = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
        rounding = resolution / math.sqrt(12)
        return cls(float(np.mean(values)), max(spread, rounding) if len(values) > 1 else math.nan, len(values))


@dataclass(frozen=True)
class Margin:
    """How much worse a candidate may be: an absolute amount, or a share of the baseline's mean."""

    size: float
    is_relative: bool

    def factor(self, better: Better) -> float:
        """Multiple of the baseline's mean at which the margin ends; 1 for an absolute margin."""
        if not self.is_relative:
            return 1.0
        return 1 - self.size if better == "higher" else 1 + self.size

    def amount(self, baseline: float) -> float:
        """The margin in the unit of the means."""
        return self.size * abs(baseline) if self.is_relative else self.size


@dataclass(frozen=True)
class MarginTest:
    """A test of one margin. worse: the candidate's mean minus the baseline's, above 0 where it is worse."""

    answer: Answer
    worse: float
    low: float
    high: float
    """`low` to `high`: where `worse` lies, each end with confidence 1 - alpha."""
    p_value: float
    """Probability of such runs where the candidate is worse by just the margin."""


def not_worse(
    candidate: Runs, baseline: Runs, margin: Margin, *, better: Better, alpha: float = ALPHA
) -> MarginTest | None:
    """Whether the candidate is worse by less than the margin: `pass` where that is shown, `fail` where more than the
    margin is shown. None where a side has fewer than two runs, which say nothing of their noise."""
    if min(candidate.number, baseline.number) < 2:
        return None
    sign, factor = (1 if better == "lower" else -1), margin.factor(better)
    beyond = sign * (candidate.mean - factor * baseline.mean) - (0.0 if margin.is_relative else margin.size)
    error, freedom = _error(candidate, baseline, factor)
    worse = sign * (candidate.mean - baseline.mean)
    if error == 0:  # nothing moves at all: the means are known exactly
        answer: Answer = "pass" if beyond < 0 else "fail"
        return MarginTest(answer, worse, worse, worse, float(beyond >= 0))
    p_value, critical = float(stdtr(freedom, beyond / error)), float(stdtrit(freedom, 1 - alpha))
    own_error, own_freedom = _error(candidate, baseline, 1.0)
    half = float(stdtrit(own_freedom, 1 - alpha)) * own_error
    answer = "pass" if p_value <= alpha else "fail" if beyond / error > critical else "inconclusive"
    return MarginTest(answer, worse, worse - half, worse + half, p_value)


def equal(
    candidate: Runs, baseline: Runs, margin: Margin, *, better: Better, alpha: float = ALPHA
) -> MarginTest | None:
    """Whether the candidate is neither worse nor better by the margin: two one-sided tests, each at `alpha`.

    None where a side has fewer than two runs.
    """
    worse = not_worse(candidate, baseline, margin, better=better, alpha=alpha)
    best = not_worse(candidate, baseline, margin, better=_turned(better), alpha=alpha)
    if worse is None or best is None:
        return None
    answers = {worse.answer, best.answer}
    answer: Answer = "fail" if "fail" in answers else "inconclusive" if "inconclusive" in answers else "pass"
    return MarginTest(answer, worse.worse, worse.low, worse.high, max(worse.p_value, best.p_value))


def power(candidate: Runs, baseline: Runs, margin: Margin, *, better: Better, alpha: float = ALPHA) -> float:
    """Probability that runs of this noise are shown to be not worse where the true means are equal: a tail of the
    noncentral t distribution."""
    error, freedom = _error(candidate, baseline, margin.factor(better))
    if error == 0:
        return 1.0
    critical = float(stdtrit(freedom, 1 - alpha))
    return float(nct.sf(critical, freedom, margin.amount(baseline.mean) / error))


def power_of_both(candidate: Runs, baseline: Runs, margin: Margin, *, better: Better, alpha: float = ALPHA) -> float:
    """Probability that `equal` passes where the true means are equal, from below: what both tests miss is added."""
    ways = (better, _turned(better))
    return max(0.0, sum(power(candidate, baseline, margin, better=way, alpha=alpha) for way in ways) - 1)


def above(runs: Runs, limit: float, *, alpha: float = ALPHA) -> tuple[Answer, float, float]:
    """Whether a mean is above a limit by the whole of its interval, which holds it with confidence 1 - alpha: `pass`,
    `fail` where all of it is below, else `inconclusive`; and the two ends. At least two runs."""
    half = float(stdtrit(runs.number - 1, 1 - alpha / 2)) * runs.stdev / math.sqrt(runs.number)
    low, high = runs.mean - half, runs.mean + half
    return "pass" if low > limit else "fail" if high < limit else "inconclusive", low, high


def power_above(runs: Runs, limit: float, *, alpha: float = ALPHA) -> float:
    """Probability that as many runs of this mean and noise are shown to be above the limit."""
    if runs.stdev == 0:
        return float(runs.mean > limit)
    freedom = runs.number - 1
    away = (runs.mean - limit) / runs.stdev * math.sqrt(runs.number)
    return float(nct.sf(float(stdtrit(freedom, 1 - alpha / 2)), freedom, away))


def runs_needed_above(runs: Runs, limit: float, *, alpha: float = ALPHA) -> int | None:
    """Smallest number of runs of this mean and noise of which 9 in 10 sets are shown to be above the limit; None where
    the mean is not above it, or MOST_RUNS are too few."""
    if runs.mean <= limit:
        return None
    return runs_needed(lambda n: n > 1 and power_above(runs.repeated(n), limit, alpha=alpha) >= POWER)


def runs_needed(enough: Callable[[int], bool]) -> int | None:
    """Smallest number of runs of each side that is enough, where more than enough is enough too; None: more than
    MOST_RUNS."""
    if not enough(MOST_RUNS):
        return None
    low, high = 1, MOST_RUNS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _error(candidate: Runs, baseline: Runs, factor: float) -> tuple[float, float]:
    """Standard error of candidate - factor * baseline, and its degrees of freedom: those of Welch and Satterthwaite,
    and at most those of sides that are equally noisy.

    Three runs against ten pass 5.5 % at the margin by the former alone, 6.1 % against thirty: where the few have little
    spread by chance, the error is too small and the degrees of freedom are those of the many as well (4.1 % here).
    """
    sides = candidate, baseline
    parts = [candidate.stdev**2 / candidate.number, (factor * baseline.stdev) ** 2 / baseline.number]
    if sum(parts) == 0:
        return 0.0, math.inf
    alike = [1 / candidate.number, factor**2 / baseline.number]
    return math.sqrt(sum(parts)), min(_freedom(parts, sides), _freedom(alike, sides))


def _freedom(parts: Sequence[float], sides: Sequence[Runs]) -> float:
    """Degrees of freedom of a sum of these variances of means."""
    return sum(parts) ** 2 / sum(part**2 / (runs.number - 1) for part, runs in zip(parts, sides, strict=True))


def _turned(better: Better) -> Better:
    return "higher" if better == "lower" else "lower"
