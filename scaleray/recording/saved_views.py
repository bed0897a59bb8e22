"""Chart pages of MLflow made from code, for trainings, a study and a sweep. A saved view is a tag of the experiment,
which links can address.

The format is that of MLflow 3.17's own pages and is undocumented: callers continue if it fails."""

import base64
import json
import time
import urllib.parse
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from scaleray.common import metric_names as names
from scaleray.common.metric import Metric
from scaleray.recording.store import experiment_link
from scaleray.recording.study_values import record_values, safe_name
from scaleray.records.study_record import StudyRecord
from scaleray.records.sweep_record import SweepRecord

TAG = "mlflow.sharedViewState."
LONGEST_TAG = 5000
"""Length of an experiment's tag that every database of MLflow accepts."""
PREFIX = "deflate;"
TRAININGS = "scaleray-trainings"
"""Key of the view of an experiment's trainings."""
MOST_METRICS = 6
"""Largest number of evaluation metrics in the table."""
PARAMS = ("topology.workers", "derived.global_batch_size", "derived.learning_rate", "derived.strategy")
FOLDED_OF_TRAININGS = ("train", "perf", "point", "system", "checkpoint", "compression")
KEY_TAG = "scaleray.study"
"""Tag of a parent and its children: the parent's run id."""
FOLDED_OF_STUDY = ("scaling", "batch", "point", "trial", "progress", "train", "perf")
BY_WORKERS, BY_SAMPLES, BY_BATCH = ("Scaling (step = workers)", "Noise (step = samples)", "Batches (step = batch size)")
"""Sections of charts. MLflow labels every axis `Step`, whatever it counts."""
MOST_RULES = 6
"""Largest number of lines of one chart."""


@dataclass(frozen=True)
class Chart:
    """One chart. metrics: names; of a parallel or scatter chart, those after `params`. x_log, y_log: logarithmic axes.

    kind: `LINE`, `BAR`, `SCATTER` (first param or metric against the last) or `PARALLEL`."""

    kind: str
    section: str
    metrics: Sequence[str]
    params: Sequence[str] = ()
    title: str = ""
    x_log: bool = False
    y_log: bool = False


@dataclass(frozen=True)
class View:
    """A chart page.

    search: MLflow's filter. sort_by: a metric, since sorting by anything but the date shows children next to their
    parent; "" is the date. columns: those of the table, such as metrics.`point/world_size`."""

    name: str
    search: str
    sort_by: str
    charts: Sequence[Chart]
    columns: Sequence[str] = ()
    is_ascending: bool = True
    folded: Sequence[str] = ()
    """First parts of the names of metrics whose charts MLflow adds by default: their sections are closed."""


def tag(key: str, view: View, *, created_at: float | None = None) -> tuple[str, str]:
    """(name, value) of the experiment's tag that holds the view. created_at: wall clock in s; None is now."""
    state = json.dumps(_state(view), separators=(",", ":")).encode()
    packed = PREFIX + base64.b64encode(zlib.compress(state, 9)).decode()
    now_ms = int((time.time() if created_at is None else created_at) * 1000)
    value = json.dumps({"name": view.name, "createdAt": now_ms, "updatedAt": now_ms, "state": packed})
    return TAG + key, value


def state_of(value: str) -> dict[str, Any]:
    """The state of the page in a `tag`."""
    packed = json.loads(value)["state"].removeprefix(PREFIX)
    state: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(packed)))
    return state


def link(uri: str, experiment_id: str, key: str) -> str:
    """Address of the view for a browser."""
    query = urllib.parse.urlencode({"compareRunsMode": "CHART", "viewStateShareKey": key})
    return f"{experiment_link(uri, experiment_id)}&{query}"


def trainings_view(metrics: Sequence[str]) -> View:
    """Trainings side by side, their quality first. metrics: those of evaluations, `split/metric`."""
    training = [Chart("LINE", "Training, by step", [metric.name]) for metric in (names.LOSS, names.LEARNING_RATE)]
    quality = [Chart("LINE", "Evaluations, by step", [name]) for name in metrics]
    speed = [Chart("LINE", "Speed, by step", [metric.name]) for metric in (names.SAMPLES_PER_S, names.STEP_TIME_S)]
    whole = [
        Chart("BAR", "Whole runs", [metric.name]) for metric in (names.POINT_SAMPLES_PER_S, names.PEAK_MEMORY_BYTES)
    ]
    shown = [*metrics, names.LOSS.name, names.POINT_SAMPLES_PER_S.name]
    return View(
        "Trainings",
        "tags.`scaleray.kind` = 'train'",
        "",  # newest first
        [*quality, *training, *speed, *whole],
        [*(f"params.`{name}`" for name in PARAMS), *(f"metrics.`{name}`" for name in shown), "attributes.`User`"],
        is_ascending=False,
        folded=list(dict.fromkeys([*(name.partition("/")[0] for name in metrics), *FOLDED_OF_TRAININGS])),
    )


def save_trainings(client: Any, experiment_id: str, metrics: Iterable[str]) -> None:
    """Save the experiment's view, adding these metrics, the most informative first, to those of earlier runs."""
    tags = client.get_experiment(experiment_id).tags
    kept = tags.get(f"{TAG}{TRAININGS}")
    columns = state_of(kept)["selectedColumns"] if kept else []
    others = {names.LOSS.name, names.POINT_SAMPLES_PER_S.name}
    before = [name for column in columns if (name := column[9:-1]) not in others and column.startswith("metrics.")]
    known = list(dict.fromkeys([*before, *metrics]))[:MOST_METRICS]
    if known != before or not kept:
        client.set_experiment_tag(experiment_id, *tag(TRAININGS, trainings_view(known)))


def trainings_link(uri: str, experiment_id: str) -> str:
    """Address of the table of the experiment's trainings, with their charts one click away."""
    return f"{experiment_link(uri, experiment_id)}&viewStateShareKey={TRAININGS}"


def view_of(kind: str, name: str, run_id: str, record: StudyRecord | SweepRecord | None) -> View:
    """Charts of the parent's curves first, then of the children next to each other.

    kind: as in the parent's tag. record: None while it runs; the charts are then those that need no curves."""
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
    return View(f"Study {name}", search, names.SCALING_IDEAL.name, charts, _columns(columns), folded=FOLDED_OF_STUDY)


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
    folded = list(dict.fromkeys([*FOLDED_OF_STUDY, *([safe_name(record.metric).partition("/")[0]] if record else [])]))
    return View(f"Sweep {name}", search, names.TRIAL_VALUE.name, charts, columns, is_ascending, folded)


def _sweep_curves(record: SweepRecord) -> list[Chart]:
    known = {key for key, *_ in record_values(record)}

    def chart(title: str, start: str, *, y_log: bool = False) -> Chart:
        found = sorted(key for key in known if key.startswith(start))[:MOST_RULES]
        return Chart("LINE", BY_BATCH, found, title=title, x_log=True, y_log=y_log)

    charts = [
        chart(f"Best {record.metric}", names.batch_curve("best_value", "")),
        chart("Samples to target", names.batch_curve("samples_to_target", ""), y_log=True),
        chart("Time to target", names.batch_curve("time_to_target_s", ""), y_log=True),
        chart("Best learning rate", names.batch_curve("best_learning_rate", ""), y_log=True),
        chart("Goodput", names.BATCH_GOODPUT.name),
    ]
    return [made for made in charts if made.metrics]


def _columns(metrics: Sequence[Metric]) -> list[str]:
    return [f"metrics.`{metric.name}`" for metric in metrics]


def _state(view: View) -> dict[str, Any]:
    sections = list(dict.fromkeys(chart.section for chart in view.charts))
    return {
        "searchFilter": view.search,
        "orderByKey": f"metrics.`{view.sort_by}`" if view.sort_by else "attributes.start_time",
        "orderByAsc": view.is_ascending,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "selectedColumns": list(view.columns),
        "runsHiddenMode": "SHOW_ALL",
        "runListHidden": False,
        "hideEmptyCharts": True,
        "compareRunCharts": [_chart(chart, number) for number, chart in enumerate(view.charts)],
        "compareRunSections": [
            *(_section(_section_id(name), name, is_open=True) for name in sections),
            *(_section(f"scaleray-folded-{name}", name, is_open=False) for name in view.folded),
        ],
        "isAccordionReordered": True,
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
    }


def _section(uuid: str, name: str, *, is_open: bool) -> dict[str, Any]:
    return {
        "uuid": uuid,
        "name": name,
        "display": is_open,
        "isReordered": True,
        "deleted": False,
        "isGenerated": False,
        "columns": 2,
        "cardHeight": 360,
    }


def _section_id(name: str) -> str:
    return "scaleray-" + "".join(c if c.isalnum() else "-" for c in name.lower())


def _chart(chart: Chart, number: int) -> dict[str, Any]:
    common = {
        "uuid": f"scaleray-{number}",
        "type": chart.kind,
        "metricSectionId": _section_id(chart.section),
        "deleted": False,
        "isGenerated": False,
        "runsCountToCompare": 100,
        "displayName": chart.title or None,
    }
    if chart.kind == "LINE":
        return {
            **common,
            "metricKey": chart.metrics[0],
            "selectedMetricKeys": list(chart.metrics),
            "lineSmoothness": 0,
            "useGlobalLineSmoothing": False,
            "useGlobalXaxisKey": False,
            "xAxisKey": "step",
            "yAxisKey": "metric",
            "yAxisExpressions": [],
            "selectedXAxisMetricKey": "",
            "displayPoints": True,
            "ignoreOutliers": False,
            "xAxisScaleType": "log" if chart.x_log else "linear",
            "scaleType": "log" if chart.y_log else "linear",
            "range": {},
        }
    if chart.kind == "BAR":
        return {**common, "metricKey": chart.metrics[0]}
    if chart.kind == "SCATTER":
        axes = [("PARAM", key) for key in chart.params] + [("METRIC", key) for key in chart.metrics]
        x, y = ({"type": kind, "key": key} for kind, key in (axes[0], axes[-1]))
        return {**common, "xaxis": x, "yaxis": y}
    return {**common, "selectedParams": list(chart.params), "selectedMetrics": list(chart.metrics), "showAllRuns": True}
