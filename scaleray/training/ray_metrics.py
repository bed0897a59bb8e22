"""Publish series of metrics through Ray's nodes, where Prometheus scrapes them.

Setting a value takes two microseconds and does not block, because Ray's core exports values every ten seconds in its
own thread. Ray drops gauges that have not been set for two of these intervals, so those of a finished run disappear."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from scaleray.common.metric import Metric, prometheus_name
from scaleray.live.state.rank_series import rank_series
from scaleray.live.state.series import Series
from scaleray.records.published import RankSample
from scaleray.records.run_record import WorkerMessage

PUBLISH_EVERY_S = 5.0
RAYS_PREFIX = "ray_"
"""Prefix that Ray adds to every name."""


class RayMetrics:
    """Publishes series from this process. make: creates a Ray metric, given its kind, name, help and labels."""

    def __init__(self, make: Callable[..., Any] | None = None) -> None:
        self._make = make or _make
        self._made: dict[Metric, Any] = {}
        self._counted: dict[tuple[Metric, tuple[str, ...]], float] = {}
        self._turn = threading.Lock()  # two at once would count the same twice

    def publish(self, series: Sequence[Series]) -> None:
        """Set all gauges and increase all counters to these values, from any thread. Ray leaves out values that are not
        finite."""
        with self._turn:
            self._publish(series)

    def _publish(self, series: Sequence[Series]) -> None:
        for metric, labels, value in series:
            if not math.isfinite(value):
                continue
            if metric not in self._made:
                name = prometheus_name(metric).removeprefix(RAYS_PREFIX)
                self._made[metric] = self._make(metric.kind, name, metric.help, metric.all_labels)
            made, tags = self._made[metric], dict(labels)
            if metric.kind == "gauge":
                made.set(value, tags)
                continue
            key = metric, tuple(labels[name] for name in metric.all_labels)
            more = value - self._counted.get(key, 0.0)
            if more > 0:  # Ray refuses 0
                made.inc(more, tags)
                self._counted[key] = value


def _make(kind: str, name: str, help: str, labels: tuple[str, ...]) -> Any:
    from ray.util.metrics import Counter, Gauge

    return (Counter if kind == "counter" else Gauge)(name, description=help, tag_keys=labels)


class RankPublisher:
    """Publishes this rank's newest sample every `PUBLISH_EVERY_S`, in a thread, so that it remains visible while a step
    hangs."""

    def __init__(self, run_name: str, run_id: str, to: Callable[[Sequence[Series]], None] | None = None) -> None:
        self._run_name, self._run_id, self._to = run_name, run_id, to or RayMetrics().publish
        self._series: Sequence[Series] = ()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._publish_on, name="scaleray-metrics", daemon=True)

    def __enter__(self) -> RankPublisher:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._publish()  # what ends before it was published is seen all the same: Ray exports it with the process's end

    def on_message(self, message: WorkerMessage) -> None:
        """Take a sample; other messages are ignored."""
        if isinstance(message, RankSample):
            self._series = rank_series(message, run_name=self._run_name, run_id=self._run_id)

    def _publish_on(self) -> None:
        while not self._stop.wait(PUBLISH_EVERY_S):
            self._publish()

    def _publish(self) -> None:
        with contextlib.suppress(Exception):  # a training does not end for what only watches it
            self._to(self._series)
