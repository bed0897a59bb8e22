"""A run's metrics while it lives, kept from what the recorder hears."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial

from scaleray.config.base import without_password
from scaleray.errors import UsageError
from scaleray.monitoring.live.run_series import Beside, RunSeries
from scaleray.monitoring.live.series import Series
from scaleray.planner.hardware.catalogue import find_gpu
from scaleray.records.run import Heartbeat, WorkerMessage
from scaleray.records.start import steady_time
from scaleray.tracking.publisher import Publisher
from scaleray.tracking.run_description import RunDescription
from scaleray.tracking.run_time import RunTime
from scaleray.tracking.spool import Spool
from scaleray.tracking.steps_file import StepsFile


class PublishedMetrics(Publisher):
    """Everything that is published of a run. run_time, steps, spool: the recorder's own."""

    silent: Callable[[], Collection[int]] = frozenset
    """Gives the ranks that are lost: their newest samples say nothing any more."""
    beats: Callable[[], Sequence[Heartbeat]] = tuple
    """Gives the last sign of life of every rank."""

    def __init__(self, description: RunDescription, run_time: RunTime, steps: StepsFile, spool: Spool) -> None:
        d = self.description = description
        super().__init__(d.published.port)
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
        self._lock = threading.Lock()  # the recorder's thread hears; others ask

    def begin(self, mlflow_link: str) -> None:
        """Begin to serve and to publish. Raises ConfigError for a port in use."""
        self._links["mlflow_run"] = without_password(mlflow_link)
        self.open()

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

    def own_series(self) -> list[Series]:
        """Series that exist once a run: under Ray each rank publishes its own."""
        beside = self._beside()
        with self._lock:
            return self._series.of_run(beside)

    def _beside(self) -> Beside:
        return Beside(
            now=steady_time(),
            goodput=self._time.so_far(),
            nonfinite_steps=self._steps.num_nonfinite,
            spooled_points=len(self._spool.points()),
            disk_free=free_share(self.description.work_dir),
            links=dict(self._links),
            beats=self.beats(),
            status=self._status,
        )


def free_share(folder: str) -> float | None:
    """Free share of the disk that has a folder; None if that is not known."""
    try:
        usage = shutil.disk_usage(folder)
        return usage.free / usage.total
    except (OSError, ZeroDivisionError):
        return None


def _peak_of(device: str, *, precision: str) -> float | None:
    """Dense peak of a GPU in FLOP/s, where the catalogue knows it."""
    try:
        return None if precision == "fp64" else find_gpu(device).peak_flops(precision)
    except UsageError:
        return None
