"""Pauses of Python's garbage collector: they stop everything that a step does, and phases do not show why."""

from __future__ import annotations

import gc
import time


class Pauses:
    """Seconds that collections of this process take, in any thread: each holds the interpreter."""

    def __init__(self) -> None:
        self._total_s, self._told_s, self._begun = 0.0, 0.0, 0.0
        gc.callbacks.append(self._note)

    def since_last(self) -> float:
        """Seconds since this was asked the last time."""
        told, self._told_s = self._told_s, self._total_s
        return self._total_s - told

    def close(self) -> None:
        """Watch no more. Safe to call twice."""
        if self._note in gc.callbacks:
            gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._begun = time.perf_counter()
        else:
            self._total_s += time.perf_counter() - self._begun
