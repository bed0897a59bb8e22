"""Writes to MLflow in the order in which they were asked for, by a thread of its own; tried again while it is away."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from scaleray.tracking.retry import Backoff

REFUSALS = (
    "INVALID_PARAMETER_VALUE",
    "BAD_REQUEST",
    "RESOURCE_DOES_NOT_EXIST",
    "RESOURCE_ALREADY_EXISTS",
    "PERMISSION_DENIED",
)


class WriteQueue:
    """Carries out writes one after another. problem: why the last one that failed did, in words."""

    def __init__(self) -> None:
        self.problem = "no answer in time"
        self._waiting: deque[Callable[[], None]] = deque()
        self._num_refused = 0
        self._has_work = threading.Condition()
        self._is_closed = self._is_last_try = False
        self._thread = threading.Thread(target=self._write_all, name="scaleray-study-run", daemon=True)
        self._thread.start()

    def add(self, write: Callable[[], None]) -> None:
        """Carry it out after all before it. Returns at once."""
        with self._has_work:
            self._waiting.append(write)
            self._has_work.notify_all()

    def drain(self, timeout_s: float) -> None:
        """Return when nothing waits any more, or a last try of what waits has failed."""
        deadline = time.monotonic() + timeout_s
        with self._has_work:
            self._is_last_try = True
            self._has_work.notify_all()
            while self._waiting and self._is_last_try and time.monotonic() < deadline:
                self._has_work.wait(timeout=max(0.0, deadline - time.monotonic()))
            self._is_last_try = False

    def close(self) -> int:
        """End the thread; gives how many writes were refused or are left."""
        with self._has_work:
            self._is_closed = True
            left = len(self._waiting) + self._num_refused
            self._has_work.notify_all()
        return left

    def _write_all(self) -> None:
        backoff = Backoff()
        while True:
            with self._has_work:
                while not self._waiting and not self._is_closed:
                    self._has_work.wait()
                if self._is_closed:
                    return
                write = self._waiting[0]
            try:
                write()
            except Exception as exc:  # whatever MLflow raises, the study goes on
                with self._has_work:
                    self.problem = f"{type(exc).__name__}: {(str(exc).splitlines() or [''])[0]}"[:300]
                    if _is_refusal(exc):
                        self._num_refused += 1
                    else:
                        self._wait_to_retry(backoff.failed())
                        continue
            backoff.reset()
            with self._has_work:
                self._waiting.popleft()
                self._has_work.notify_all()

    def _wait_to_retry(self, wait_s: float) -> None:
        if self._is_last_try:
            self._is_last_try = False  # whoever waits for it need not wait any longer
            self._has_work.notify_all()
        else:
            self._has_work.wait_for(lambda: self._is_last_try or self._is_closed, timeout=wait_s)


def _is_refusal(exc: Exception) -> bool:
    """Whether the same write would be refused again: trying it once more would keep back all that follow."""
    return getattr(exc, "error_code", "") in REFUSALS or isinstance(exc, (FileNotFoundError, ValueError, TypeError))
