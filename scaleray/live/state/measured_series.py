"""Series of a study's or sweep's measurements so far: points or trials, progress and ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from scaleray.common import live_metrics as live
from scaleray.common import metric_names as names
from scaleray.common.metric import Metric
from scaleray.live.state.rank_series import ComparedRanks, rank_series
from scaleray.live.state.series import Series, run_labels, series_of
from scaleray.records.study_record import Estimate, Mode, Point
from scaleray.records.sweep_record import Trial

MOST_TRIALS = 200
"""Number of newest trials that have their own series; MLflow has the rest of a large sweep."""


@dataclass(frozen=True)
class PointSoFar:
    """A point with repeats still to come; its values have no confidence intervals yet."""

    mode: Mode
    workers: int
    samples_per_s: Estimate
    step_time_s: Estimate


@dataclass(frozen=True)
class Measured:
    """Current state of a study or sweep. done, total: numbers of repeats or trials."""

    kind: Literal["study", "sweep"]
    done: float
    total: float | None
    points: Sequence[Point | PointSoFar] = ()
    trials: Sequence[Trial] = ()
    workers: int | None = None
    """Workers of each trial."""
    strategy: str = ""
    job: str = ""
    links: Mapping[str, str] = field(default_factory=dict)
    """Addresses of the pages `mlflow_run` and `report`."""
    disk_free: float | None = None
    waiting: int = 0
    """Number of writes that MLflow has not accepted."""
    status: str = ""
    """Status, named as in MLflow; empty before the end."""


def measured_series(measured: Measured, ranks: ComparedRanks, *, run_name: str, run_id: str) -> list[Series]:
    """All series. ranks: newest samples of the workers in the current measurement."""
    common, m = run_labels(run_name, run_id), measured

    def one(metric: Metric, value: float | None, /, **labels: object) -> list[Series]:
        return series_of(metric, common, value, **labels)

    links = {"mlflow_run": "", "report": "", **m.links}
    return [
        *one(live.MEASURED, m.done, kind=m.kind),
        *one(live.MEASURED_PLANNED, m.total, kind=m.kind),
        *one(names.WORKERS, m.workers),
        *one(live.RECORDER_SPOOLED_POINTS, m.waiting),
        *one(live.DISK_FREE, m.disk_free),
        *one(live.RUN_INFO, 1.0, **links, strategy=m.strategy, job=m.job),
        *one(live.RUN_FINISHED, m.status in ("FINISHED", "KILLED")),
        *one(live.RUN_FAILED, m.status == "FAILED"),
        *(series for point in m.points for series in _of_point(point, m.points, common)),
        *(series for trial in m.trials[-MOST_TRIALS:] for series in _of_trial(trial, common)),
        *(series for sample in ranks.samples.values() for series in _of_rank(rank_series(sample, **_named(common)))),
        *ranks.series(**_named(common)),
    ]


def efficiency(point: Point | PointSoFar, points: Sequence[Point | PointSoFar]) -> float | None:
    """Efficiency, for strong and weak scaling: samples per second and worker, divided by those of the point with fewest
    workers on the same curve. None until there is another point."""
    curve = [other for other in points if other.mode == point.mode]
    base = min(curve, key=lambda other: other.workers)
    if len(curve) < 2:
        return None
    return point.samples_per_s.value / point.workers / (base.samples_per_s.value / base.workers)


def _of_point(
    point: Point | PointSoFar, points: Sequence[Point | PointSoFar], common: Mapping[str, str]
) -> list[Series]:
    labels = {"mode": point.mode, "workers": point.workers}
    values = {
        names.POINT_SAMPLES_PER_S: point.samples_per_s.value,
        names.WORLD_SIZE: point.workers,
        names.POINT_STEP_TIME_S: point.step_time_s.value,
        names.POINT_EFFICIENCY: efficiency(point, points),
    }
    return [series for metric, value in values.items() for series in series_of(metric, common, value, **labels)]


def _of_trial(trial: Trial, common: Mapping[str, str]) -> list[Series]:
    labels = {
        "trial": trial.number,
        "batch_size": trial.batch_size,
        "learning_rate": f"{trial.learning_rate:.3g}",
        "rule": trial.rule,
        "status": trial.status,
    }
    values = {
        names.TRIAL_VALUE: trial.value,
        names.TRIAL_SAMPLES_PER_S: trial.samples_per_s,
        names.TRIAL_SAMPLES_TO_TARGET: trial.samples_to_target,
    }
    return [series for metric, value in values.items() for series in series_of(metric, common, value, **labels)]


def _of_rank(series: Sequence[Series]) -> list[Series]:
    """Series of a rank without the time of the last step, which would look like a hang between two repeats."""
    return [one for one in series if one.metric is not live.LAST_STEP_TIMESTAMP_S]


def _named(common: Mapping[str, str]) -> dict[str, str]:
    name, run_id = common.values()
    return {"run_name": name, "run_id": run_id}
