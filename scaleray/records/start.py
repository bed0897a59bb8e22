"""The start of a run in parts: where the seconds between a command and its first step went."""

from __future__ import annotations

import time
from collections.abc import Mapping

IMPORTS, RAY, DATA, PROCESSES, WORKER_IMPORTS = "imports", "Ray", "data", "processes", "worker imports"
MODEL, FIRST_BATCH, FIRST_STEP = "model", "first batch", "first step"
PARTS = (IMPORTS, RAY, DATA, PROCESSES, WORKER_IMPORTS, MODEL, FIRST_BATCH, FIRST_STEP)
"""Parts in their order: the command's own imports; the time that Ray, which starts concurrently, takes beyond them;
workload, data and the values derived from the config; the launch until the first worker's process exists; its imports
and the process group; building the model; the first batch with its check; and the first step.
"""

LONG_S = 8.0
"""Seconds from which on a start is long enough to say where they went."""


_OFFSET_S = time.time() - time.monotonic()


def steady_time() -> float:
    """Seconds since 1970 by a clock that never steps: the wall clock of when this process began, and the seconds since
    then. For both ends of a duration; what is a fact, such as when a run started, may be read from it too."""
    return _OFFSET_S + time.monotonic()


def in_words(parts: Mapping[str, float]) -> str:
    """The parts of a start in one line, with their seconds."""
    known = " | ".join(f"{part} {seconds:.1f}" for part, seconds in parts.items() if seconds >= 0.05)
    return f"first step after {sum(parts.values()):.1f} s: {known}"


class StartClock:
    """Wall clocks at which the parts of a start ended, on the driver and then on its first worker."""

    def __init__(self, started_at: float, ends: Mapping[str, float] | None = None) -> None:
        self.started_at = started_at
        self.ends = dict(ends or {})

    def end(self, part: str, at: float | None = None) -> None:
        """A part has ended. at: by `steady_time`; None is now. Only the first end counts."""
        self.ends.setdefault(part, steady_time() if at is None else at)

    def seconds(self) -> dict[str, float]:
        """Seconds of each part whose end is known; clocks of two nodes may differ, but no part takes less than none."""
        found: dict[str, float] = {}
        before = self.started_at
        for part in PARTS:
            if part in self.ends:
                found[part] = max(0.0, self.ends[part] - before)
                before = max(before, self.ends[part])
        return found
