"""What this rank measured in its last steps, for whoever asks while it trains: heartbeats carry it to the recorder."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from scaleray.records.live import RecentSteps
from scaleray.records.phases import PARTS
from scaleray.training.profile.marks import StepParts

TOLD_EVERY_S = 1.0


class Recent:
    """Keeps the parts of steps, and tells their means about once a second. memory: gives bytes by name."""

    def __init__(self, tell: Callable[[RecentSteps], None], memory: Callable[[], dict[str, int]]) -> None:
        self._tell, self._memory = tell, memory
        self._steps: list[StepParts] = []
        self._told_at = time.perf_counter()

    def add(self, step: StepParts) -> None:
        """Add the next step."""
        self._steps.append(step)

    def is_due(self, now: float) -> bool:
        """Whether it is time to tell. now: reading of `time.perf_counter`."""
        return now - self._told_at >= TOLD_EVERY_S and bool(self._steps)

    def tell(self, step: int, now: float) -> None:
        """Tell of the steps since the last time. step: number of the last one."""
        self._told_at, steps, self._steps = now, self._steps, []
        sums = [math.fsum(seconds) for seconds in zip(*(parts for _, parts in steps), strict=True)]
        means = {str(part): seconds / len(steps) for part, seconds in zip(PARTS, sums, strict=True) if seconds}
        mean_s = math.fsum(step_s for step_s, _ in steps) / len(steps)
        self._tell(RecentSteps(step, len(steps), mean_s, means, self._memory()))
