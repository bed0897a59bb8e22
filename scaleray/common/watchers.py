"""Observers of a training, and the one guard that keeps their errors from ending it.

A watcher reads or reports a training and decides nothing: without it the weights are the same to the bit. A new one
gets a name here and is called through a `Guard`. Code that decides, or whose output is a result (evaluations,
checkpoints, final weights), is not a watcher, and neither is the recorder as a whole: its loss ends the run, since a
run without a record is not worth its time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import StrEnum
from typing import Any, TypeVar

from scaleray.errors import first_line

T = TypeVar("T")


class Watcher(StrEnum):
    """Everything that watches, under the name that a user reads."""

    SYSTEM_METRICS = "system metrics"
    MEMORY = "memory report"
    NOISE = "gradient noise scale"
    TRACES = "traces"
    FIGURES = "figures of a step"
    NOTES = "notes"
    SUMMARY = "summary"
    MESSAGES = "messages to the recorder"
    DISPLAY = "display"
    RECORDING = "recorded messages"
    RECORD = "record's extras"
    STALLS = "dumps of hangs"
    ALERTS = "alerts"
    PUBLISHING = "metrics for Prometheus"


RETRIED = frozenset({Watcher.MESSAGES, Watcher.DISPLAY, Watcher.RECORDING, Watcher.PUBLISHING})
"""Watchers of which each call counts alone: one that fails loses its message, and the next one is
tried all the same.
"""


class Guard:
    """Calls watchers. What one raises is said once, with what is lost; after that it is not called any more.

    say: takes the sentence; None, or where it fails itself, is the log. Not for several threads, whose worst is a
    doubled sentence.
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._say = say
        self._failed: set[tuple[Watcher, str]] = set()

    def __call__(self, watcher: Watcher, look: Callable[[], T], otherwise: Any, *, part: str = "") -> T:
        """Result of `look`, or `otherwise` if it fails or has failed before. part: the part of a watcher that can fail
        alone.
        """
        if (watcher, part) in self._failed and watcher not in RETRIED:
            return otherwise
        try:
            return self._call(watcher, look)
        except Exception as exc:  # whatever it is: a driver's, a library's or our own slip
            if (watcher, part) not in self._failed:
                self._failed.add((watcher, part))
                self._tell(_sentence(watcher, part, exc), exc)
            return otherwise

    def wrapped(self, watcher: Watcher, function: Callable[..., Any]) -> Callable[..., None]:
        """A function whose result is not needed, guarded."""

        def guarded(*args: Any, **kwargs: Any) -> None:
            self(watcher, lambda: function(*args, **kwargs), None)

        return guarded

    def _call(self, watcher: Watcher, look: Callable[[], T]) -> T:
        return look()  # a place of its own, where a test can make any watcher fail

    def _tell(self, text: str, exc: Exception) -> None:
        try:
            if self._say is not None:
                return self._say(text)
        except Exception:  # whoever would say it watches too
            pass
        logging.getLogger(__name__).warning(text, exc_info=exc)


def _sentence(watcher: Watcher, part: str, exc: Exception) -> str:
    reason = f"{type(exc).__name__}: {first_line(exc)}"
    what = f"{watcher} ({part})" if part else watcher
    if watcher in RETRIED:
        return f"{what}: at least one is lost ({reason}); the training continues"
    return f"{what}: not watched any more ({reason}); the training continues without"
