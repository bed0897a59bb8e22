"""Durations of steps, and the speed of training in its steady state."""

import math
import statistics
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from scaleray.records.start import FIRST_STEP, StartClock, steady_time
from scaleray.training.profile.profiler import Profile


@dataclass(frozen=True)
class SteadyState:
    """Steps after the warm-up of a process, and their times. The first step is counted from the process's start."""

    first: int
    total_s: float
    median_s: float
    wait_share: float
    """Share of the time spent waiting for input."""


class Clock:
    """Time from step to step, including the time for records but not evaluation. Steps are counted from 0.

    started_at: wall-clock time at the start of the run. start_ends: end of each part of the start-up. first_step_s:
    seconds from the start of the run to the end of the first step. profile: measures the parts of each step."""

    def __init__(self, started_at: float, start_ends: Mapping[str, float], profile: Profile) -> None:
        self.profile = profile
        self.begin = StartClock(started_at, start_ends)
        self.first_step_s = math.nan
        self.times, self.waits = array("d"), array("d")
        self.total_s = 0.0

    def start(self, waited_s: float) -> None:
        """Start timing at the beginning of a step. waited_s: total seconds spent waiting for input so far."""
        self._started, self._waited = time.perf_counter(), waited_s
        self.profile.start(self._started)

    def tick(self, waited_s: float) -> tuple[float, float]:
        """(seconds since the last tick or start, seconds of that spent waiting for input)."""
        now = time.perf_counter()
        step_s, wait_s = now - self._started, waited_s - self._waited
        self._started, self._waited = now, waited_s
        if not self.times:
            now_s = steady_time()
            self.begin.end(FIRST_STEP, now_s)
            self.first_step_s = now_s - self.begin.started_at
        self.times.append(step_s)
        self.waits.append(wait_s)
        self.total_s += step_s
        self.profile.cut(step_s, now)
        return step_s, wait_s

    def steady_state(self) -> SteadyState | None:
        """Steady state without the first 20 % of the steps, but at least 10 and at most half of them; None for fewer
        than 2 steps."""
        count = len(self.times)
        if count < 2:
            return None
        first = min(max(10, count // 5), count // 2)
        times, waits = self.times[first:], self.waits[first:]
        total_s = sum(times)
        return SteadyState(first, total_s, statistics.median(times), sum(waits) / total_s)
