"""A run's messages for a display, which asks for those that are new."""

from __future__ import annotations

from scaleray.records.run import WorkerMessage

MOST_KEPT = 20_000
"""Messages that are kept without a display: a driver's memory must not grow with the number of steps."""


class ShownMessages:
    """The newest messages, numbered from 0."""

    def __init__(self) -> None:
        self._messages: list[WorkerMessage] = []
        self._first = 0

    def add(self, message: WorkerMessage) -> None:
        """Add one; of too many, the older half is forgotten."""
        self._messages.append(message)
        if len(self._messages) > MOST_KEPT:
            self._first += MOST_KEPT // 2
            del self._messages[: MOST_KEPT // 2]

    def after(self, number: int) -> tuple[int, list[WorkerMessage]]:
        """Messages from `number` on, as far as they are kept, and the number to ask for next."""
        shown = self._messages[max(0, number - self._first) :]
        return self._first + len(self._messages), shown
