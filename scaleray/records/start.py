"""Start-up time of a run, divided into parts from the command to its first step."""

import time
from collections.abc import Mapping

IMPORTS, RAY, DATA, PROCESSES, WORKER_IMPORTS = "imports", "Ray", "data", "processes", "worker imports"
MODEL, FIRST_BATCH, FIRST_STEP = "model", "first batch", "first step"
PARTS = (IMPORTS, RAY, DATA, PROCESSES, WORKER_IMPORTS, MODEL, FIRST_BATCH, FIRST_STEP)
"""Parts in order: the command's own imports; the additional time of Ray, which starts concurrently; workload, data and
the values derived from the config; the launch of the first worker's process; its imports and the process group;
building the model; the first batch with its check; the first step.
"""

LONG_S = 8.0
"""Seconds above which the parts of a start are reported."""


_OFFSET_S = time.time() - time.monotonic()


def steady_time() -> float:
    """Seconds since 1970 by a monotonic clock: the wall clock at the start of this process, plus the seconds since
    then. Used for both ends of a duration and for facts such as a run's start time."""
    return _OFFSET_S + time.monotonic()


def to_text(parts: Mapping[str, float]) -> str:
    """The parts of a start with their seconds, in one line."""
    known = " | ".join(f"{part} {seconds:.1f}" for part, seconds in parts.items() if seconds >= 0.05)
    return f"first step after {sum(parts.values()):.1f} s: {known}"


class StartClock:
    """Records when the parts of a start end, first on the driver and then on the first worker."""

    def __init__(self, started_at: float, ends: Mapping[str, float] | None = None) -> None:
        self.started_at = started_at
        self.ends = dict(ends or {})

    def end(self, part: str, at: float | None = None) -> None:
        """Record the end of a part. at: time by `steady_time`; None means now. Only the first end counts."""
        self.ends.setdefault(part, steady_time() if at is None else at)

    def seconds(self) -> dict[str, float]:
        """Seconds of each part whose end is known. The clocks of two nodes may differ, so negative values become 0."""
        found: dict[str, float] = {}
        before = self.started_at
        for part in PARTS:
            if part in self.ends:
                found[part] = max(0.0, self.ends[part] - before)
                before = max(before, self.ends[part])
        return found
