"""The change of step times between two sets of launches, and whether it exceeds the noise.

The difference between two launches of the same training (placement, neighbours, clocks) is usually larger than the
noise of their steps, and a single launch does not show it. A launch therefore counts as one measurement, the logarithm
of its median step time. With at least 2 on each side, the difference of their means gets Welch's interval with the
degrees of freedom of the smaller side, which has at least its nominal coverage for any spreads of the two sides (Mickey
and Brown 1966, Ann. Math. Stat. 37(3):639-642; Welch's own degrees of freedom alarm falsely in 10 % of comparisons of 2
launches with 10). With fewer launches, nothing is called slower: the verdict is `inconclusive`, with the number of
launches that would suffice."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.special import stdtrit

from scaleray.records.study_record import Estimate
from scaleray.studies.curves.efficiency import CONFIDENCE, MOST_LOG, Turns, ratio, resampled

LEAST_LAUNCHES = 2
"""Minimum number of launches of each side for a verdict."""
LEAST_PAIRS = 3
POWER = 0.8
"""Probability with which the advised number of launches detects a difference as large as the observed one."""
MOST_REPEATS = 100
"""Largest number of launches of each side that is advised."""

Basis = Literal["launches", "one side's launches", "steps"]
Pairs = Mapping[Any, float]
"""Seconds for the same work, by the settings of the measurement."""


@dataclass(frozen=True)
class Change:
    """Time for the same work relative to the base: 1.04 is slower by 4 %.

    basis: source of the interval: launches of both sides; launches of one side, assuming an equal spread of the other;
    or only steps, which differ by less than launches. spread: standard deviation of a launch's log time; with basis
    `steps` that of the steps, a lower bound."""

    time_ratio: Estimate
    basis: Basis = "launches"
    spread: float | None = None

    @property
    def verdict(self) -> str:
        """Verdict: `slower`, `faster`, `no difference` (none that exceeds the noise), or `inconclusive`: more than the
        known noise, while the difference between launches is unknown."""
        found = "slower" if self.time_ratio.low > 1 else "faster" if self.time_ratio.high < 1 else "no difference"
        return found if found == "no difference" or self.basis == "launches" else "inconclusive"

    @property
    def repeats(self) -> int | None:
        """Launches of each side needed to detect a difference as large as this one; None if more than `MOST_REPEATS`
        would be needed or no spread is known. A lower bound if the spread is that of steps."""
        if self.spread is None or self.time_ratio.value == 1:
            return None
        size = abs(math.log(self.time_ratio.value))
        return next((n for n in range(LEAST_LAUNCHES, MOST_REPEATS + 1) if _reach(n, self.spread) <= size), None)

    def __str__(self) -> str:
        """The change as text, such as `slower by 4.1 % (2.9 to 5.2), beyond noise`; in per cent of the base's time."""
        verdict, value = self.verdict, self.time_ratio.value
        if verdict == "no difference":
            low, high = (100 * (r - 1) for r in (self.time_ratio.low, self.time_ratio.high))
            text = f"no difference beyond noise ({low:+.1f} to {high:+.1f} %{self._reservation})"
            if self.basis == "launches" and self.repeats is not None:
                text += f"; {self.repeats} launches of each would show a difference of {100 * abs(value - 1):.1f} %"
            return text
        if verdict != "inconclusive":
            return f"{self._size}, beyond noise"
        if self.basis == "steps":
            known, about = "the spread between launches is unknown", "at least"
        else:
            spread = f"{100 * (self.spread or 0):.2g} %"
            known, about = f"one side is a single launch, and launches of the other side differ by {spread}", "about"
        needed = f"{about} {self.repeats}" if self.repeats else f"more than {MOST_REPEATS}"
        return f"inconclusive: {self._size}, but {known}; {needed} launches of each would decide"

    @property
    def _size(self) -> str:
        """The size of the change as text, such as `slower by 4.1 % (2.9 to 5.2)`."""
        r = self.time_ratio
        if not 0.5 <= r.value <= 2:
            return f"takes {r.value:.3g} times as long ({r.low:.3g} to {r.high:.3g}{self._reservation})"
        value, low, high = (100 * (number - 1) for number in (r.value, r.low, r.high))
        if value > 0:
            return f"slower by {value:.1f} % ({low:.1f} to {high:.1f}{self._reservation})"
        return f"faster by {-value:.1f} % ({-high:.1f} to {-low:.1f}{self._reservation})"

    @property
    def _reservation(self) -> str:
        return {
            "launches": "",
            "one side's launches": " if both have the same spread",
            "steps": " from the noise of steps alone",
        }[self.basis]


def change_of_launches(mine: Sequence[Turns], base: Sequence[Turns], *, alike: Sequence[Turns] = ()) -> Change:
    """Change between launches of the same work. mine, base: for each launch its turns, for each turn its step times in
    s.

    alike: launches, including these, that are known to be the same: 3 or more show the spread if both sides are single.
    Raises UsageError for times that are not finite and above 0, or missing."""
    # first, as it refuses times that have no logarithm
    noise = [float(np.mean([_noise(turns) for turns in side])) for side in (mine, base)]
    sides = [[_log_median(turns) for turns in side] for side in (mine, base)]
    found = _of_launches(sides, noise, alike=[_log_median(turns) for turns in alike])
    if found is not None:
        return found
    of_steps = ratio([turn for turns in mine for turn in turns], [turn for turns in base for turn in turns])
    return Change(of_steps, "steps", math.sqrt(sum(noise) / 2))


def change_of_trials(mine: Sequence[Pairs], base: Sequence[Pairs], *, alike: Sequence[Pairs] = ()) -> Change | None:
    """Change between sweeps. mine, base: a mapping for each sweep; settings common to all sweeps are compared as pairs,
    which cancels the effect of the settings. None for fewer than 3 such settings. alike: see `change_of_launches`."""
    common = [key for key in base[0] if all(key in one for one in (*mine, *base, *alike))]
    if len(common) < LEAST_PAIRS:
        return None
    logs = [np.log([[one[key] for key in common] for one in side]) for side in (mine, base, alike) if side]
    pairs = logs[0].mean(axis=0) - logs[1].mean(axis=0)
    error = float(pairs.std(ddof=1)) / math.sqrt(len(common))
    sides = [[float(v) for v in side.mean(axis=1)] for side in logs]
    # the pairs' error is that of a difference of two means
    noise = [error**2 / (1 / len(mine) + 1 / len(base))] * 2
    found = _of_launches(sides[:2], noise, alike=sides[2] if alike else [])
    if found is not None:
        return found
    of_pairs = _estimate(float(pairs.mean()), _quantile(len(common) - 1) * error)
    return Change(of_pairs, "steps", math.sqrt(noise[0]))


def _of_launches(sides: Sequence[Sequence[float]], noise: Sequence[float], *, alike: Sequence[float]) -> Change | None:
    """Change by the spread between launches; None if no such spread is known. sides: log times of the launches of each
    side. noise: for each side, variance of a launch's log time from its steps alone."""
    counts = [len(side) for side in sides]
    value = float(np.mean(sides[0]) - np.mean(sides[1]))
    # launches that lie together by chance are not known better than their steps are
    known = [max(float(np.var(s, ddof=1)), n) if len(s) > 1 else None for s, n in zip(sides, noise, strict=True)]
    first, second = known
    if first is not None and second is not None:
        error = math.sqrt(first / counts[0] + second / counts[1])
        estimate = _estimate(value, _quantile(min(counts) - 1) * error)
        return Change(estimate, "launches", math.sqrt((first + second) / 2))
    if len(alike) > LEAST_LAUNCHES:
        spread = math.sqrt(max(float(np.var(alike, ddof=1)), *noise))
        return Change(_estimate(value, _quantile(len(alike) - 1) * spread * math.sqrt(2)), "launches", spread)
    one = first if first is not None else second
    if one is not None:
        reach = _quantile(max(counts) - 1) * math.sqrt(one * (1 / counts[0] + 1 / counts[1]))
        return Change(_estimate(value, reach), "one side's launches", math.sqrt(one))
    return None


def _reach(launches: int, spread: float) -> float:
    """Difference of log times that this many launches of each side detect with probability `POWER`."""
    error = spread * math.sqrt(2 / launches)
    return (_quantile(launches - 1) + float(stdtrit(launches - 1, POWER))) * error


def _quantile(degrees_of_freedom: int) -> float:
    return float(stdtrit(degrees_of_freedom, (1 + CONFIDENCE) / 2))


def _estimate(log_value: float, reach: float) -> Estimate:
    reach = min(reach, MOST_LOG)
    return Estimate(math.exp(log_value), math.exp(log_value - reach), math.exp(log_value + reach))


def _log_median(turns: Turns) -> float:
    return math.log(float(np.median([step for turn in turns for step in turn])))


def _noise(turns: Turns) -> float:
    """Variance of a launch's log median, from its turns and blocks of steps."""
    return float(np.var(resampled(turns).deviations))
