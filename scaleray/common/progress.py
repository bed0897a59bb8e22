"""Current activity of a command, as stages that its code opens for a display. Without a display, a stage costs next to
nothing, so any module may open one; stages of workers are not shown.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Protocol


class Stage:
    """One activity in progress.

    total: amount to do, in `unit`; None if unknown. before: amount done before the stage began, as in a resumed run.
    done: amount done so far. note: additional information.
    """

    def __init__(self, name: str, *, total: float | None = None, unit: str = "", before: float = 0.0) -> None:
        self.name, self.total, self.unit, self.note = name, total, unit, ""
        self.before = self.done = before
        self.started_at = time.monotonic()

    def advance(self, by: float = 1.0) -> None:
        """Increase the amount done."""
        self.done += by

    @property
    def elapsed_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.started_at

    @property
    def left_s(self) -> float | None:
        """Remaining seconds at the speed so far; None if unknown."""
        if not self.total or not self.before < self.done <= self.total:
            return None
        return self.elapsed_s * (self.total - self.done) / (self.done - self.before)


class Display(Protocol):
    """Display of stages, called in the thread that opens and closes them."""

    def begin(self, stage: Stage) -> None:
        """Show that a stage has begun."""

    def end(self, stage: Stage) -> None:
        """Show that a stage has ended."""


_displays: list[Display] = []
_lock = threading.Lock()


@contextlib.contextmanager
def shown_by(display: Display) -> Iterator[None]:
    """Context in which `display` shows the stages of this process; the innermost context is used."""
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
    """Context of a stage. name: description, such as `reading the data`. before: amount done earlier."""
    this, display = Stage(name, total=total, unit=unit, before=before), _displays[-1] if _displays else None
    if display is not None:
        display.begin(this)
    try:
        yield this
    finally:
        if display is not None:
            display.end(this)
