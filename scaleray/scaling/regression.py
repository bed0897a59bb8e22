"""Whether something became slower: the change of step times between two sets of measurements, told from noise or not.

Two ways, as the measurements allow: turns (or whole runs) of both sides, resampled as in `efficiency`; or pairs of figures
measured under the same settings, whose mean change gets the interval of Student's t.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from scaleray.scaling.efficiency import CONFIDENCE, Turns, ratio
from scaleray.study_records import Estimate

LEAST_PAIRS = 3


@dataclass(frozen=True)
class Change:
    """How much time the same work takes over that of the base: 1.04 is slower by 4 %."""

    time_ratio: Estimate

    @property
    def verdict(self) -> str:
        """`slower`, `faster` or `no difference`, which is one that cannot be told from noise."""
        return "slower" if self.time_ratio.low > 1 else "faster" if self.time_ratio.high < 1 else "no difference"

    def __str__(self) -> str:
        """`slower by 4.1 % (2.9 to 5.2), beyond noise`; per cent of the base's time."""
        if self.verdict != "no difference" and not 0.5 <= self.time_ratio.value <= 2:
            r = self.time_ratio
            return f"takes {r.value:.3g} times as long ({r.low:.3g} to {r.high:.3g}), beyond noise"
        value, low, high = (100 * (r - 1) for r in (self.time_ratio.value, self.time_ratio.low, self.time_ratio.high))
        if self.verdict == "slower":
            return f"slower by {value:.1f} % ({low:.1f} to {high:.1f}), beyond noise"
        if self.verdict == "faster":
            return f"faster by {-value:.1f} % ({-high:.1f} to {-low:.1f}), beyond noise"
        return f"no difference that can be told from noise ({low:+.1f} to {high:+.1f} %)"


def change_of_turns(turns: Turns, base: Turns) -> Change:
    """Of times for the same work, in s, a list for each turn or run. Raises UsageError for times that are none."""
    return Change(ratio(turns, base))


def change_of_pairs(pairs: Sequence[tuple[float, float]]) -> Change | None:
    """Of (time, base's time) measured under the same settings, each pair under others; None for fewer than 3 pairs."""
    if len(pairs) < LEAST_PAIRS:
        return None
    logs = np.log([time / base for time, base in pairs])
    count, mean = len(logs), float(logs.mean())
    reach = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * float(logs.std(ddof=1)) / math.sqrt(count)
    return Change(Estimate(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach)))
