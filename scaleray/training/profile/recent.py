"""What this rank measured in its last steps, for whoever asks while it trains: heartbeats carry it to the recorder."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from scaleray.records.live import RecentSteps
from scaleray.records.phases import PARTS

TOLD_EVERY_S = 1.0


class Recent:
    """Sums the parts of steps, and tells their means about once a second. memory: gives bytes by name."""

    def __init__(self, tell: Callable[[RecentSteps], None], memory: Callable[[], dict[str, int]]) -> None:
        self._tell, self._memory = tell, memory
        self._step_s, self._parts, self._count = 0.0, [0.0] * len(PARTS), 0
        self._told_at = time.monotonic()

    def add(self, step_s: float, parts: Sequence[float]) -> None:
        """Add the next step."""
        self._step_s += step_s
        self._parts = [before + seconds for before, seconds in zip(self._parts, parts, strict=True)]
        self._count += 1

    def tell(self, step: int) -> None:
        """Tell, where it is time to. step: number of the last step."""
        if not self._count or time.monotonic() - self._told_at < TOLD_EVERY_S:
            return
        means = {str(part): seconds / self._count for part, seconds in zip(PARTS, self._parts, strict=True) if seconds}
        self._tell(RecentSteps(step, self._count, self._step_s / self._count, means, self._memory()))
        self._step_s, self._parts, self._count = 0.0, [0.0] * len(PARTS), 0
        self._told_at = time.monotonic()
