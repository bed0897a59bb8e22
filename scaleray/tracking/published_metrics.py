"""A run's metrics while it lives: kept from what the recorder hears, served on 127.0.0.1 where a port was given, and
handed at intervals to whoever publishes them elsewhere."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from time import time as wall_clock

from scaleray.config.base import without_password
from scaleray.errors import UsageError
from scaleray.monitoring.live.run_series import Beside, RunSeries
from scaleray.monitoring.live.series import Series
from scaleray.planner.hardware.catalogue import find_gpu
from scaleray.records.run import Heartbeat, WorkerMessage
from scaleray.tracking.metrics_endpoint import MetricsEndpoint
from scaleray.tracking.run_description import RunDescription
from scaleray.tracking.run_time import RunTime
from scaleray.tracking.spool import Spool
from scaleray.tracking.steps_file import StepsFile

PUBLISH_EVERY_S = 5.0
LOOKED_S, LAST_LOOK_S = 30.0, 6.0
"""Seconds within which somebody must have looked at the page for its end to wait for a last look, and how long it waits
then: who never hears of a run's end takes it for lost."""


class PublishedMetrics:
    """Everything that is published of a run. run_time, steps, spool: the recorder's own.

    publish: takes the series that a run has once, in a thread; None is nobody.
    """

    publish: Callable[[Sequence[Series]], None] | None = None
    silent: Callable[[], Collection[int]] = frozenset
    """Gives the ranks that are lost: their newest samples say nothing any more."""
    beats: Callable[[], Sequence[Heartbeat]] = tuple
    """Gives the last sign of life of every rank."""

    def __init__(self, description: RunDescription, run_time: RunTime, steps: StepsFile, spool: Spool) -> None:
        d = self.description = description
        self._time, self._steps, self._spool = run_time, steps, spool
        self._series = RunSeries(
            d.published,
            run_name=d.run_name,
            run_id=d.run_id,
            strategy=d.strategy,
            total_steps=d.total_steps,
            tokens_per_sample=d.tokens_per_sample,
            peak_of=partial(_peak_of, precision=d.published.precision),
            long_phase_s=d.alerts.long_phase_s,
        )
        self._links = {"report": without_password(d.run_path or d.work_dir)}
        self._status = ""
        self._lock = threading.Lock()  # the recorder's thread hears; others ask
        self._has_ended = threading.Event()
        self._endpoint: MetricsEndpoint | None = None
        self._looked_at = -LOOKED_S
        self._has_seen_end = threading.Event()

    def begin(self, mlflow_link: str) -> None:
        """Begin to serve and to publish. Raises ConfigError for a port in use."""
        self._links["mlflow_run"] = without_password(mlflow_link)
        if self.description.published.port is not None and self._endpoint is None:
            self._endpoint = MetricsEndpoint(self.description.published.port, self._shown)
        if self.publish is not None:
            threading.Thread(target=self._publish_on, name="scaleray-metrics", daemon=True).start()

    def hear(self, message: WorkerMessage) -> None:
        """Take what the run says of itself."""
        with self._lock:
            self._series.hear(message)

    def series(self) -> list[Series]:
        """All series of the run and of its ranks, as they are now."""
        beside = self._beside()
        silent = {str(rank) for rank in self.silent()}
        with self._lock:
            found = [*self._series.of_run(beside), *self._series.of_ranks()]
        return [one for one in found if one.labels.get("rank") not in silent]

    def _shown(self) -> list[Series]:
        """What whoever looks at the page is shown."""
        self._looked_at, has_ended = time.monotonic(), bool(self._status)
        found = self.series()
        if has_ended:
            self._has_seen_end.set()
        return found

    def end(self, status: str) -> None:
        """Publish that the run has ended, for as long as anybody looks. status: in MLflow's words."""
        self._status = status
        self._has_ended.set()
        if self.publish is not None:
            self._publish_now()

    def close(self) -> None:
        """Serve no more."""
        self._has_ended.set()
        if self._endpoint is not None:
            is_looked_at = self._status and time.monotonic() - self._looked_at < LOOKED_S
            if is_looked_at and self._has_seen_end.wait(LAST_LOOK_S):
                time.sleep(0.2)  # the answer is still on its way
            self._endpoint.close()
            self._endpoint = None

    def _publish_on(self) -> None:
        self._publish_now()
        while not self._has_ended.wait(PUBLISH_EVERY_S):
            self._publish_now()

    def _publish_now(self) -> None:
        assert self.publish is not None
        beside = self._beside()
        with self._lock:
            found = self._series.of_run(beside)
        self.publish(found)

    def _beside(self) -> Beside:
        try:
            usage = shutil.disk_usage(self.description.work_dir)
            free: float | None = usage.free / usage.total
        except (OSError, ZeroDivisionError):
            free = None
        return Beside(
            now=wall_clock(),
            goodput=self._time.so_far(),
            nonfinite_steps=self._steps.num_nonfinite,
            spooled_points=len(self._spool.points()),
            disk_free=free,
            links=dict(self._links),
            beats=self.beats(),
            status=self._status,
        )


def _peak_of(device: str, *, precision: str) -> float | None:
    """Dense peak of a GPU in FLOP/s, where the catalogue knows it."""
    try:
        return None if precision == "fp64" else find_gpu(device).peak_flops(precision)
    except UsageError:
        return None
