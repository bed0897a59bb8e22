"""Observers of a training, and the guard that keeps their errors from ending it.

A watcher reads or reports a training and decides nothing: without it, the weights are bit-identical. A new watcher gets
a name here and is called through a `Guard`. Code that decides, or whose output is a result (evaluations, checkpoints,
final weights), is not a watcher. Neither is the recorder as a whole: its loss ends the run, since a run without a
record is worthless.
"""

import logging
from collections.abc import Callable
from enum import StrEnum
from typing import Any, TypeVar

from scaleray.errors import first_line

T = TypeVar("T")


class Watcher(StrEnum):
    """All watchers, with their names for users."""

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
"""Watchers whose calls are independent: a failed call loses its message, and later calls are still made."""


class Guard:
    """Calls watchers. The first error of a watcher is reported with its consequence; after that it is no longer called.

    say: receives the message; if it is None or fails, the log does. Not thread-safe: at worst, a message appears twice.
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._say = say
        self._failed: set[tuple[Watcher, str]] = set()

    def __call__(self, watcher: Watcher, look: Callable[[], T], otherwise: Any, *, part: str = "") -> T:
        """Return the result of `look`, or `otherwise` if it fails or has failed before. part: of a watcher, if its
        parts fail separately.
        """
        if (watcher, part) in self._failed and watcher not in RETRIED:
            return otherwise
        try:
            return self._call(watcher, look)
        except Exception as exc:  # any error: of a driver, of a library, or of scaleray
            if (watcher, part) not in self._failed:
                self._failed.add((watcher, part))
                self._tell(_sentence(watcher, part, exc), exc)
            return otherwise

    def wrapped(self, watcher: Watcher, function: Callable[..., Any]) -> Callable[..., None]:
        """Guard a function whose result is not needed."""

        def guarded(*args: Any, **kwargs: Any) -> None:
            self(watcher, lambda: function(*args, **kwargs), None)

        return guarded

    def _call(self, watcher: Watcher, look: Callable[[], T]) -> T:
        return look()  # a separate function, in which a test can make any watcher fail

    def _tell(self, text: str, exc: Exception) -> None:
        try:
            if self._say is not None:
                return self._say(text)
        except Exception:  # the reporter itself is a watcher
            pass
        logging.getLogger(__name__).warning(text, exc_info=exc)


def _sentence(watcher: Watcher, part: str, exc: Exception) -> str:
    reason = f"{type(exc).__name__}: {first_line(exc)}"
    what = f"{watcher} ({part})" if part else watcher
    if watcher in RETRIED:
        return f"{what}: at least one is lost ({reason}); the training continues"
    return f"{what}: no longer observed ({reason}); the training continues without it"
