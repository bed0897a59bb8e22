"""Metrics published by a running run, derived from its state."""

import shutil
from collections.abc import Callable, Collection, Sequence
from functools import partial

from scaleray.config.base import without_password
from scaleray.config.hardware.catalogue import find_gpu
from scaleray.errors import UsageError
from scaleray.live.publisher import Publisher
from scaleray.live.state.run_series import RunSeries
from scaleray.live.state.run_state import RunState
from scaleray.live.state.series import Series
from scaleray.live.steps_file import StepsFile
from scaleray.recording.spool import Spool
from scaleray.records.run_description import RunDescription
from scaleray.records.run_record import Heartbeat
from scaleray.records.start import steady_time


class PublishedMetrics(Publisher):
    """All published metrics of a run. state, steps, spool: those of the recorder. beats: returns the last heartbeat of
    every rank. silent: returns the lost ranks, whose newest samples are out of date."""

    def __init__(
        self,
        description: RunDescription,
        state: RunState,
        steps: StepsFile,
        spool: Spool,
        *,
        beats: Callable[[], Sequence[Heartbeat]],
        silent: Callable[[], Collection[int]],
    ) -> None:
        d = self.description = description
        super().__init__(d.published.port)
        self._steps, self._spool, self._beats, self._silent = steps, spool, beats, silent
        self._series = RunSeries(
            d.published,
            state,
            run_name=d.run_name,
            run_id=d.run_id,
            strategy=d.strategy,
            total_steps=d.total_steps,
            peak_of=partial(_peak_of, precision=d.published.precision),
            long_phase_s=d.alerts.long_phase_s,
        )
        self._links = {"report": without_password(d.run_path or d.work_dir)}

    def begin(self, mlflow_link: str) -> None:
        """Begin serving and publishing. Raises ConfigError for a port in use."""
        self._links["mlflow_run"] = without_password(mlflow_link)
        self.open()

    def series(self) -> list[Series]:
        """All current series of the run and its ranks."""
        silent = {str(rank) for rank in self._silent()}
        found = [*self.own_series(), *self._series.of_ranks()]
        return [one for one in found if one.labels.get("rank") not in silent]

    def own_series(self) -> list[Series]:
        """Series that exist once per run; under Ray each rank publishes its own series."""
        return self._series.of_run(
            steady_time(),
            nonfinite_steps=self._steps.num_nonfinite,
            spooled_points=len(self._spool.points()),
            disk_free=free_share(self.description.work_dir),
            pages=dict(self._links),
            beats=self._beats(),
            status=self._status,
        )


def free_share(folder: str) -> float | None:
    """Free share of the disk that contains a folder; None if unknown."""
    try:
        usage = shutil.disk_usage(folder)
        return usage.free / usage.total
    except (OSError, ZeroDivisionError):
        return None


def _peak_of(device: str, *, precision: str) -> float | None:
    """Dense peak of a GPU in FLOP/s, if it is in the catalogue."""
    try:
        return None if precision == "fp64" else find_gpu(device).peak_flops(precision)
    except UsageError:
        return None
