"""The chart page on which MLflow opens a study or a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from scaleray import metric_names as names
from scaleray.metric import Metric
from scaleray.records.study import StudyRecord
from scaleray.records.sweep import SweepRecord
from scaleray.tracking.saved_views import Chart, View
from scaleray.tracking.study_values import record_values, safe_name

KEY_TAG = "scaleray.study"
"""Tag of a parent and its children: the parent's run id."""
FOLDED = ("scaling", "batch", "point", "trial", "progress", "train", "perf")
BY_WORKERS, BY_SAMPLES, BY_BATCH = ("Scaling (step = workers)", "Noise (step = samples)", "Batches (step = batch size)")
"""Sections of charts. MLflow writes `Step` below every axis, whatever it counts there."""
MOST_RULES = 6
"""Largest number of lines of one chart."""


def view_of(kind: str, name: str, run_id: str, record: StudyRecord | SweepRecord | None) -> View:
    """Charts of the parent's curves first, then of the children beside each other.

    kind: as in the parent's tag. record: None while it goes on; the charts are then those that need no curves.
    """
    search = f"tags.`{KEY_TAG}` = '{run_id}'"
    if kind == "sweep":
        return _sweep_view(name, search, record if isinstance(record, SweepRecord) else None)
    return _study_view(name, search, record if isinstance(record, StudyRecord) else None)


def _study_view(name: str, search: str, record: StudyRecord | None) -> View:
    charts = _study_curves(record) if record else []
    bars = (names.POINT_SAMPLES_PER_S, names.POINT_STEP_TIME_S, names.POINT_EFFICIENCY, names.PEAK_MEMORY_BYTES)
    charts += [Chart("BAR", "Points", [metric.name]) for metric in bars]
    columns = (names.WORLD_SIZE, names.POINT_SAMPLES_PER_S, names.POINT_STEP_TIME_S, names.POINT_EFFICIENCY)
    # a metric of the parent alone: its curves' names then come first in the legends
    return View(f"Study {name}", search, names.SCALING_IDEAL.name, charts, _columns(columns), folded=FOLDED)


def _study_curves(record: StudyRecord) -> list[Chart]:
    known = {key for key, *_ in record_values(record)}
    charts: list[Chart] = []

    def add(
        title: str, metrics: list[str], *, y_log: bool = False, x_log: bool = True, section: str = BY_WORKERS
    ) -> None:
        if kept := [metric for metric in metrics if metric in known]:
            charts.append(Chart("LINE", section, kept, title=title, x_log=x_log, y_log=y_log))

    for mode in (curve.mode for curve in record.curves):
        curve, title = partial(names.scaling_curve, mode), mode.capitalize()
        add(f"{title} speed-up", [curve("speedup"), names.SCALING_IDEAL.name, curve("fit")], y_log=True)
        add(f"{title} efficiency", [curve("efficiency"), curve("efficiency_low"), curve("efficiency_high")])
        add(f"{title} samples/s", [curve("samples_per_s")], y_log=True)
        add(f"{title}: share of the step that waits for communication", [curve("exposed_comm_share")])
        add(f"{title}: cost of a million samples", [curve("cost_per_million_samples")])
        add(f"{title}: time to target", [curve("time_to_target_s")])
    add("Noise scale against samples", [names.NOISE_SCALE.name], x_log=False, y_log=True, section=BY_SAMPLES)
    return charts


def _sweep_view(name: str, search: str, record: SweepRecord | None) -> View:
    charts = _sweep_curves(record) if record else []
    charts += [
        Chart(
            "PARALLEL", "Trials", [names.TRIAL_VALUE.name], ["trial.rule", "trial.batch_size", "trial.learning_rate"]
        ),
        Chart("SCATTER", "Trials", [names.TRIAL_BATCH_SIZE.name, names.TRIAL_LEARNING_RATE.name]),
        Chart("SCATTER", "Trials", [names.TRIAL_LEARNING_RATE.name, names.TRIAL_VALUE.name]),
    ]
    if record and record.metric:
        charts.append(Chart("LINE", "Trials", [safe_name(record.metric)], title=f"{record.metric} against samples"))
    columns = ["params.`trial.rule`", "params.`trial.batch_size`", "params.`trial.learning_rate`"]
    columns += _columns((names.TRIAL_VALUE, names.TRIAL_SAMPLES_TO_TARGET))
    is_ascending = record is None or record.direction == "min"
    # the best trials first, and among them the parent, which has the best value too: its curves must be on the first
    # page
    folded = list(dict.fromkeys([*FOLDED, *([safe_name(record.metric).partition("/")[0]] if record else [])]))
    return View(f"Sweep {name}", search, names.TRIAL_VALUE.name, charts, columns, is_ascending, folded)


def _sweep_curves(record: SweepRecord) -> list[Chart]:
    known = {key for key, *_ in record_values(record)}

    def chart(title: str, start: str, *, y_log: bool = False) -> Chart:
        found = sorted(key for key in known if key.startswith(start))[:MOST_RULES]
        return Chart("LINE", BY_BATCH, found, title=title, x_log=True, y_log=y_log)

    charts = [
        chart("Samples to target", names.batch_curve("samples_to_target", ""), y_log=True),
        chart("Time to target", names.batch_curve("time_to_target_s", ""), y_log=True),
        chart(f"Best {record.metric}", names.batch_curve("best_value", "")),
        chart("Best learning rate", names.batch_curve("best_learning_rate", ""), y_log=True),
        chart("Goodput", names.BATCH_GOODPUT.name),
    ]
    return [made for made in charts if made.metrics]


def _columns(metrics: Sequence[Metric]) -> list[str]:
    return [f"metrics.`{metric.name}`" for metric in metrics]
