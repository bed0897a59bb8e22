"""Publish the series of a running process: on 127.0.0.1 if a port is given, and periodically through a function that
publishes them elsewhere."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from scaleray.common.watchers import Guard, Watcher
from scaleray.live.metrics_endpoint import MetricsEndpoint
from scaleray.live.state.series import Series

PUBLISH_EVERY_S = 5.0
READ_WITHIN_S, LAST_READ_S = 30.0, 6.0
"""If the page was read within READ_WITHIN_S seconds, `end` waits up to LAST_READ_S for a last read: a reader that
misses a run's end reports the run as lost."""


class Publisher(ABC):
    """Publishes the series of a subclass. port: None disables the page. publish: called in a thread with the series
    that no other process publishes, or None. say: logs the first failure; failures are otherwise ignored."""

    publish: Callable[[Sequence[Series]], None] | None = None
    say: Callable[[str], None] | None = None

    def __init__(self, port: int | None) -> None:
        self._port = port
        self._status = ""
        self._has_ended = threading.Event()
        self._endpoint: MetricsEndpoint | None = None
        self._looked_at = -READ_WITHIN_S
        self._has_seen_end = threading.Event()
        self._guard = Guard(self._say_of_problem)
        self._turn = threading.Lock()  # the end publishes beside the thread

    @abstractmethod
    def series(self) -> list[Series]:
        """All current series."""

    @abstractmethod
    def own_series(self) -> list[Series]:
        """Series that no other process publishes."""

    def open(self) -> None:
        """Start serving and publishing. Raises ConfigError if the port is in use."""
        if self._port is not None and self._endpoint is None:
            self._endpoint = MetricsEndpoint(self._port, self._shown)
        if self.publish is not None:
            threading.Thread(target=self._publish_on, name="scaleray-metrics", daemon=True).start()

    def end(self, status: str) -> None:
        """Publish the end of the run, and wait for a last read of the page. status: named as in MLflow."""
        self._status = status
        self._has_ended.set()
        self._publish()

    def close(self) -> None:
        """Stop serving."""
        self._has_ended.set()
        if self._endpoint is not None:
            was_read = self._status and time.monotonic() - self._looked_at < READ_WITHIN_S
            if was_read and self._has_seen_end.wait(LAST_READ_S):
                time.sleep(0.2)  # the answer is still on its way
            self._endpoint.close()
            self._endpoint = None

    def _shown(self) -> list[Series]:
        """Series served on the metrics page."""
        self._looked_at, has_ended = time.monotonic(), bool(self._status)
        found = self.series()
        if has_ended:
            self._has_seen_end.set()
        return found

    def _publish_on(self) -> None:
        self._publish()
        while not self._has_ended.wait(PUBLISH_EVERY_S):
            self._publish()

    def _publish(self) -> None:
        if (publish := self.publish) is not None:
            with self._turn:
                self._guard(Watcher.PUBLISHING, lambda: publish(self.own_series()), None)

    def _say_of_problem(self, text: str) -> None:
        if self.say is not None:
            self.say(text)
