"""Thread that writes a run. It processes its queue in order, and no producer waits for it."""

import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from scaleray.common.watchers import Guard, Watcher
from scaleray.recording.outbox import Outbox

FLUSH_S = 1.0
MOST_PAUSES = 10
"""Longest pause between two writes, as a multiple of FLUSH_S; points have to wait for it."""
FLUSH_SHARE = 0.005
"""Maximum share of time for writes, which use the training's cores: MLflow takes 20 to 40 ms per batch of points."""
STALLED_S = 1800.0
"""Time limit in seconds for one write to MLflow, such as the upload of a large model; other requests have their own
limits."""

Item = TypeVar("Item")


@dataclass
class Marker:
    """Marks a position in the queue. When it is reached, everything before it has been written.

    then: called at that time, unless writing failed. problem: the error of writing or of `then`."""

    then: Callable[[], str | None] | None = None
    problem: str | None = None
    is_passed: threading.Event = field(default_factory=threading.Event)


class Writer(Generic[Item]):
    """Passes items one at a time to `take`, through `guard`, and calls `flush`, which must not raise, every FLUSH_S
    seconds, or less often if this would take more than FLUSH_SHARE of the time.

    flush: writes the items gathered by `take`; returns the error, if any. outbox: used by both."""

    def __init__(
        self,
        outbox: Outbox[Any],
        take: Callable[[Item], None],
        flush: Callable[[], str | None],
        *,
        name: str,
        guard: Guard | None = None,
    ) -> None:
        self._outbox, self._take, self._flush, self._guard = outbox, take, flush, guard or Guard()
        self._queue: queue.Queue[Item | Marker | None] = queue.Queue()
        self._is_abandoned = False
        self._written_at = self._flushed_at = time.monotonic()
        self._pause_s = FLUSH_S
        self._thread = threading.Thread(target=self._write_all, name=name, daemon=True)

    def start(self) -> None:
        """Begin with the items queued so far."""
        self._thread.start()

    def put(self, item: Item) -> None:
        """Queue an item. Returns immediately."""
        self._queue.put(item)

    def wait_until_written(self, marker: Marker | None = None, *, timeout_s: float | None = None) -> bool:
        """Wait until everything received so far is written or stored; returns whether it is. timeout_s: None waits
        without limit."""
        marker = marker or Marker()
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._queue.put(marker)
        while not marker.is_passed.wait(timeout=max(0.0, min(FLUSH_S, deadline - time.monotonic()))):
            written_at = max(self._written_at, self._outbox.sent_at)
            is_stalled = timeout_s is None and time.monotonic() - written_at > STALLED_S
            if is_stalled or time.monotonic() >= deadline or not self._thread.is_alive():
                return False
        return True

    def close(self) -> None:
        """End the thread after the items queued so far, waiting briefly for it."""
        self._queue.put(None)
        self._thread.join(timeout=FLUSH_S)

    def abandon(self) -> None:
        """End the thread after its current item, dropping waiting items."""
        self._is_abandoned = True
        self._queue.put(None)

    def _flush_if_due(self) -> None:
        """Flush if enough time has passed since the last time."""
        began_at = time.monotonic()
        if began_at - self._flushed_at > self._pause_s:
            self._flush()
            self._flushed_at = time.monotonic()
            self._pause_s = min(MOST_PAUSES * FLUSH_S, max(FLUSH_S, (self._flushed_at - began_at) / FLUSH_SHARE))

    def _write_all(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=FLUSH_S)
            except queue.Empty:
                self._flush_if_due()
                continue
            if self._is_abandoned:
                return
            if item is None:
                self._flush()
                return
            if isinstance(item, Marker):
                item.problem = self._flush() or (item.then() if item.then is not None else None)
                item.is_passed.set()
            else:
                self._guard(Watcher.RECORDING, partial(self._take, item), None, part=type(item).__name__)
                self._flush_if_due()
            self._written_at = time.monotonic()
