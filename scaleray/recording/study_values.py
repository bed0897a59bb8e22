"""Names, steps, params and tags of points, trials and their curves in MLflow.

Curves are on the parent, with the number of workers or the batch size as the step, so that MLflow's own charts draw
them. Single values are on the children under separate names, since they would otherwise be stray dots at step 0 of the
curves."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from scaleray.common import metric_names as names
from scaleray.recording.provenance import cost_of
from scaleray.records import chart_points
from scaleray.records.rows import Row, as_columns
from scaleray.records.settings import best_by_batch, settings
from scaleray.records.study_record import Curve, CurvePoint, Point, StudyRecord
from scaleray.records.sweep_record import SweepRecord, Trial

Value = tuple[str, float, int, float]
"""(metric, value, step, wall clock in seconds since 1970)."""

MOST_CURVE_POINTS = 200
"""Maximum number of points of one curve in MLflow; the record has all of them."""


def as_points(values: Iterable[Value]) -> list[chart_points.Point]:
    """Convert the values to MLflow's form."""
    return [(name, value, chart_points.in_ms(at), step) for name, value, step, at in values]


def point_name(point: Point) -> str:
    """Name of a point's run, which sorts by mode and number of workers."""
    return f"{point.mode}-w{point.workers:03d}-{point.strategy}-b{point.global_batch_size}"


def trial_name(trial: Trial) -> str:
    """Name of a trial's run."""
    return f"t{trial.number:04d}-b{trial.batch_size}-{trial.rule}-lr{trial.learning_rate:.3g}-s{trial.seed}"


def point_params(point: Point) -> dict[str, Any]:
    """Settings of a point."""
    return {
        "point.mode": point.mode,
        "point.workers": point.workers,
        "point.strategy": point.strategy,
        "point.global_batch_size": point.global_batch_size,
        "point.micro_batch_size": point.micro_batch_size,
        "point.accumulation_steps": point.accumulation_steps,
        "point.marks": ", ".join(point.marks) or "none",
        "point.reused_from": point.reused_from or "none",
    }


def trial_params(trial: Trial) -> dict[str, Any]:
    """Settings of a trial."""
    own = {
        "trial.batch_size": trial.batch_size,
        "trial.rule": trial.rule,
        "trial.learning_rate": trial.learning_rate,
        "trial.optimizer": trial.optimizer,
        "trial.warmup": trial.warmup,
        "trial.seed": trial.seed,
        "trial.workers": trial.workers,
        **({} if trial.same_as is None else {"trial.same_as": trial.same_as}),
    }
    return {**{safe_name(key): value for key, value in trial.settings.items()}, **own}


def point_values(point: Point) -> list[Value]:
    """Single values of a point at step 0. Its training to the target and its noise have the number of samples as the
    step."""
    at = point.measured_at
    hours = None if point.reused_from else point.workers * point_duration_s(point) / 3600
    rows = [Row(names.WORLD_SIZE, point.workers), *point.rows(), Row(names.WORKER_HOURS, hours)]
    rows = [row for row in rows if row.value or row.metric != names.PEAK_MEMORY_BYTES]  # 0 is one not measured
    curve: list[Value] = []
    if point.to_target:
        to = point.to_target
        curve = curve_values(to.metric, to.curve, to.recorded_at, began_at=at - point_duration_s(point))
    noise = thinned(point.noise.curve, MOST_CURVE_POINTS) if point.noise else []
    curve += list(_finite((names.NOISE_SCALE.name, value, samples, at) for samples, value in noise))
    return _singles(rows, at) + curve


def point_duration_s(point: Point) -> float:
    """Seconds spent on measuring a point, as far as known: the sum over its repeats."""
    return sum(map(sum, point.turns))


def trial_values(trial: Trial, *, ended_at: float) -> list[Value]:
    """Single values of a trial at step 0. Its metric has the number of samples as the step.

    ended_at: wall-clock time in seconds."""
    set_before = [
        Row(names.TRIAL_BATCH_SIZE, trial.batch_size),
        Row(names.TRIAL_LEARNING_RATE, trial.learning_rate),
        Row(names.WORLD_SIZE, trial.workers),
        Row(names.WORKER_HOURS, trial.workers * trial_duration_s(trial) / 3600),
    ]
    began_at = ended_at - trial_duration_s(trial)
    curve = curve_values(trial.metric, trial.curve, trial.recorded_at, began_at=began_at)
    return _singles([*set_before, *trial.rows()], ended_at) + curve


def trial_duration_s(trial: Trial) -> float:
    """Seconds from the start of a trial's first worker to the end of the trial; if unknown, the time of its steps."""
    return trial.total_time_s or trial.training_time_s


def relative_values(at: CurvePoint) -> list[Value]:
    """Values of a point relative to the base of its curve."""
    return _singles(at.relative_rows(), at.point.measured_at)


def curve_values(
    metric: str, curve: Sequence[tuple[int, float, float]], recorded_at: Sequence[float], *, began_at: float
) -> list[Value]:
    """Evaluations with the number of samples as the step: at most MOST_CURVE_POINTS, including the first and the last.

    recorded_at: time of each evaluation; if unknown, as in older records, `began_at` plus the seconds of training."""
    times = recorded_at if len(recorded_at) == len(curve) else [began_at + seconds for _, seconds, _ in curve]
    name, few = safe_name(metric), thinned(list(zip(curve, times, strict=True)), MOST_CURVE_POINTS)
    return [(name, float(value), samples, at) for (samples, _, value), at in few if math.isfinite(value)]


def record_values(record: StudyRecord | SweepRecord) -> list[Value]:
    """The parent's curves. A value determined by several points or trials gets the end time of the last one."""
    cost = [(name, value, 0, end_of(record)) for name, value in _cost(record).items()]
    if isinstance(record, StudyRecord):
        return [*_finite(_study_values(record)), *cost]
    return [*_finite((*value, end_of(record)) for value in _sweep_values(record)), *cost]


def _cost(record: StudyRecord | SweepRecord) -> dict[str, float]:
    """Cost of a study or sweep. A study occupies all its workers from beginning to end."""
    if isinstance(record, StudyRecord):
        workers = max((at.point.workers for curve in record.curves for at in curve.points), default=0)
        return cost_of(workers * record.duration_s, price_per_worker_hour=record.price_per_worker_hour)
    price = (record.config.get("study") or {}).get("price_per_worker_hour")
    own = [trial for trial in record.trials if trial.same_as is None]
    return cost_of(sum(t.workers * trial_duration_s(t) for t in own), price_per_worker_hour=price)


def end_of(record: StudyRecord | SweepRecord) -> float:
    """Wall-clock time at the end of a record, in seconds since 1970; a continued sweep ends with its last part."""
    trials = record.trials if isinstance(record, SweepRecord) else []
    return max([record.started_at + record.duration_s, *(t.ended_at for t in trials if t.ended_at is not None)])


def safe_name(text: str) -> str:
    """The text, restricted to characters that MLflow accepts in the name of a metric or param."""
    return re.sub(r"[^\w\-./: ]", "_", text).lstrip("/.")[:250] or "_"


def thinned(curve: Sequence[Any], most: int) -> list[Any]:
    """At most `most` items, evenly spread, including the first and the last. most: at least 2."""
    if len(curve) <= most:
        return list(curve)
    return [curve[round(n * (len(curve) - 1) / (most - 1))] for n in range(most)]


def _study_values(record: StudyRecord) -> Iterator[tuple[str, float | None, int, float]]:
    end = end_of(record)
    ideal = {p.point.workers: p.point.workers for curve in record.curves for p in curve.points}
    yield from ((names.SCALING_IDEAL.name, float(n), n, end) for n in sorted(ideal))
    for curve in record.curves:
        for at in curve.points:
            yield from ((*value, at.point.workers, at.point.measured_at) for value in _curve_values(curve, at))
        fit = next((fit for fit in curve.fits if fit.law == curve.best_law), None)
        for workers, estimate in fit.band if fit else ():
            if workers == int(workers):  # MLflow's steps are whole numbers
                yield names.scaling_curve(curve.mode, "fit"), estimate.value, int(workers), end
    noise = thinned(record.noise, MOST_CURVE_POINTS)
    yield from ((names.NOISE_SCALE.name, value, samples, end) for samples, value in noise)


def _curve_values(curve: Curve, at: CurvePoint) -> Iterator[tuple[str, float | None]]:
    for what, value in as_columns(at.rows()).items():
        if names.is_scaling_curve(curve.mode, what):
            yield names.scaling_curve(curve.mode, what), value
    point = at.point
    if point.step_time_s.value and point.exposed_comm_s is not None:
        share = point.exposed_comm_s / point.step_time_s.value
        yield names.scaling_curve(curve.mode, "exposed_comm_share"), share


def _sweep_values(record: SweepRecord) -> Iterator[tuple[str, float | None, int]]:
    values = [setting.value for setting in settings(record) if setting.value is not None]
    if values:
        yield names.TRIAL_VALUE.name, min(values) if record.direction == "min" else max(values), 0
    for rule, batches in best_by_batch(record).items():
        name = safe_name(rule)
        for batch, setting in batches.items():
            yield names.batch_curve("best_value", name), setting.value, batch
            yield names.batch_curve("best_learning_rate", name), setting.learning_rate, batch
            yield names.batch_curve("samples_to_target", name), setting.samples_to_target, batch
            yield names.batch_curve("time_to_target_s", name), setting.time_to_target_s, batch
            if setting.samples_to_target is not None:
                yield names.batch_curve("steps_to_target", name), setting.samples_to_target / batch, batch
    for at in record.goodput:
        yield from ((row.name, row.value, at.batch_size) for row in at.rows())


def _singles(rows: Iterable[Row], at: float) -> list[Value]:
    """Values at step 0. at: wall clock in s."""
    return list(_finite((row.name, row.value, 0, at) for row in rows if row.metric.is_in_mlflow))


def _finite(values: Iterable[tuple[str, float | None, int, float]]) -> Iterator[Value]:
    for name, value, step, at in values:
        if value is not None and math.isfinite(
            value
        ):  # MLflow stores infinity as the largest float, which ruins charts
            yield name, float(value), int(step), at
