"""Current activity of a command: stages that its code opens, for a display. A stage costs next to nothing without a
display, so that any floor may open one; a worker's are not shown.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Protocol


class Stage:
    """One thing that is under way.

    total: how much there is to do, in `unit`; None is not known. before: how much was done when it began, as in a
    resumed run. done: how much of it is. note: what else is known.
    """

    def __init__(self, name: str, *, total: float | None = None, unit: str = "", before: float = 0.0) -> None:
        self.name, self.total, self.unit, self.note = name, total, unit, ""
        self.before = self.done = before
        self.started_at = time.monotonic()

    def advance(self, by: float = 1.0) -> None:
        """So much more is done."""
        self.done += by

    @property
    def elapsed_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.started_at

    @property
    def left_s(self) -> float | None:
        """Seconds that are left at the speed so far; None if it is not known."""
        if not self.total or not self.before < self.done <= self.total:
            return None
        return self.elapsed_s * (self.total - self.done) / (self.done - self.before)


class Display(Protocol):
    """Display of stages; called in the thread that opens and closes them."""

    def begin(self, stage: Stage) -> None:
        """A stage has begun."""

    def end(self, stage: Stage) -> None:
        """A stage is over."""


_displays: list[Display] = []
_lock = threading.Lock()


@contextlib.contextmanager
def shown_by(display: Display) -> Iterator[None]:
    """Stages of this process are shown by `display` while the context lasts; the innermost context counts."""
    with _lock:
        _displays.append(display)
    try:
        yield
    finally:
        with _lock:
            _displays.remove(display)


def are_shown() -> bool:
    """Whether the stages of this process are displayed."""
    return bool(_displays)


@contextlib.contextmanager
def stage(name: str, *, total: float | None = None, unit: str = "", before: float = 0.0) -> Iterator[Stage]:
    """A stage that lasts as long as the context. name: what is being done, such as `reading the data`. before: how much
    was done already."""
    this, display = Stage(name, total=total, unit=unit, before=before), _displays[-1] if _displays else None
    if display is not None:
        display.begin(this)
    try:
        yield this
    finally:
        if display is not None:
            display.end(this)
