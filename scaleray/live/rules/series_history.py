"""Recent history of each series of a run, keyed by Prometheus name; input to the alert rules."""

import itertools
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scaleray.common import metric_names as names
from scaleray.common.metric import prometheus_name
from scaleray.live import foreign
from scaleray.records.run_record import StepRecord, SystemRecord
from scaleray.records.start import steady_time

MOST_POINTS = 4000
"""Points stored per series in addition to those since the last check: more than half an hour, as the rules use."""
GONE_S = 15.0
"""Seconds of silence after which a series is gone, as with Ray's gauges after two exports."""
Values = npt.NDArray[np.float64]
Points = deque[tuple[float, float]]


MOST_NEW = 50_000
"""Maximum number of messages stored until the next check."""
LOSS, GRAD_NORM = prometheus_name(names.LOSS), prometheus_name(names.GRAD_NORM)


@dataclass
class SeriesHistory:
    """History of one run. now: time of the current check, on the clock of the points; before: time of the previous
    one."""

    now: float = 0.0
    before: float = -np.inf
    series: dict[str, dict[str, Points]] = field(default_factory=dict)
    """Points (time, value) by metric, then by rank if each rank has the metric, or else by an empty name."""
    _new: deque[tuple[StepRecord | SystemRecord, float]] = field(default_factory=lambda: deque(maxlen=MOST_NEW))

    def take(self, message: StepRecord | SystemRecord) -> None:
        """Store a message, from any thread; the next check adds its points."""
        self._new.append((message, steady_time()))

    def add(self, metric: str, value: float | None, *, at: float, of: str = "") -> None:
        """Add a point unless the value is None. of: its rank or device."""
        if value is not None:
            points = self.series.setdefault(metric, {}).setdefault(of, deque())
            points.append((at, float(value)))

    def advance(self, now: float) -> None:
        """Start the next check."""
        while self._new:
            self._add_points(*self._new.popleft())
        self.before, self.now = self.now, now
        for of_metric in self.series.values():
            for points in of_metric.values():
                _forget(points, self.before)

    def _add_points(self, message: StepRecord | SystemRecord, at: float) -> None:
        """Add the values that rules need from every step and from a node's GPUs."""
        if isinstance(message, StepRecord):
            self.add(LOSS, message.loss, at=at)
            self.add(GRAD_NORM, message.grad_norm, at=at)
            return
        for name, value in message.metrics.items():
            if name.startswith("gpu_") and name.endswith("_utilization_percentage"):
                gpu = f"GPU {name.split('_')[1]} of {message.node}"
                self.add(foreign.GPU_ENGINE_ACTIVE.name, value / 100, at=at, of=gpu)

    def newest(self, metric: str) -> dict[str, float]:
        """Newest value of each rank or device that still reports."""
        found = self.series.get(metric, {})
        return {of: points[-1][1] for of, points in found.items() if points and self.now - points[-1][0] <= GONE_S}

    def last(self, metric: str) -> float | None:
        """Largest newest value over all ranks; None if none reports."""
        return max(self.newest(metric).values(), default=None)

    def past(self, metric: str, *, last_s: float, until_s: float = 0.0, of: str = "") -> Values:
        """Values between `last_s` and `until_s` seconds ago, oldest first."""
        points = self.series.get(metric, {}).get(of, ())
        return np.array([value for at, value in points if self.now - last_s <= at <= self.now - until_s])

    def past_points(self, metric: str, *, last_s: float, of: str = "") -> tuple[Values, Values]:
        """Times and values of the last seconds, oldest first."""
        points = [(at, value) for at, value in self.series.get(metric, {}).get(of, ()) if self.now - last_s <= at]
        return np.array([at for at, _ in points]), np.array([value for _, value in points])

    def points(self, metric: str) -> tuple[Values, Values]:
        """Times and values of all stored points of a metric that the run has once, oldest first."""
        points = self.series.get(metric, {}).get("", ())
        return np.array([at for at, _ in points]), np.array([value for _, value in points])

    def knows_since(self, metric: str, seconds: float, *, of: str | None = None) -> bool:
        """Whether there is a point at least this old. of: rank or device; None for any."""
        found = self.series.get(metric, {})
        looked_at = found.values() if of is None else [found.get(of, ())]
        return any(points and self.now - points[0][0] >= seconds for points in looked_at)


def _forget(points: Points, before: float) -> None:
    """Drop the oldest points except the last `MOST_POINTS` before `before`."""
    if len(points) > MOST_POINTS:
        num_new = sum(1 for _ in itertools.takewhile(lambda point: point[0] > before, reversed(points)))
        for _ in range(len(points) - num_new - MOST_POINTS):
            points.popleft()
