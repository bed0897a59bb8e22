"""Chart pages of MLflow made from code: a saved view is a tag of the experiment, to which a link can point.

The format is that of MLflow 3.17's own pages and is not documented: whoever calls this goes on when it fails.
"""

from __future__ import annotations

import base64
import json
import time
import urllib.parse
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scaleray.tracking.store import experiment_link

TAG = "mlflow.sharedViewState."
LONGEST_TAG = 5000
"""Characters of an experiment's tag that every database of MLflow takes."""
PREFIX = "deflate;"


@dataclass(frozen=True)
class Chart:
    """One chart. metrics: names; of a parallel or scatter chart, those after `params`. x_log, y_log: logarithmic axes.

    kind: `LINE`, `BAR`, `SCATTER` (first param or metric against the last) or `PARALLEL`.
    """

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

    search: MLflow's filter. sort_by: a metric, as sorting by anything but the date shows children beside their parent;
    "" is the date.
    columns: those of the table, such as metrics.`point/world_size`.
    """

    name: str
    search: str
    sort_by: str
    charts: Sequence[Chart]
    columns: Sequence[str] = ()
    is_ascending: bool = True
    folded: Sequence[str] = ()
    """First parts of metrics' names, whose charts MLflow adds by itself: their sections are closed."""


def tag(key: str, view: View, *, created_at: float | None = None) -> tuple[str, str]:
    """(name, value) of the experiment's tag that holds the view. created_at: wall clock in s; None is now."""
    state = json.dumps(_state(view), separators=(",", ":")).encode()
    packed = PREFIX + base64.b64encode(zlib.compress(state, 9)).decode()
    now_ms = int((time.time() if created_at is None else created_at) * 1000)
    value = json.dumps({"name": view.name, "createdAt": now_ms, "updatedAt": now_ms, "state": packed})
    return TAG + key, value


def state_of(value: str) -> dict[str, Any]:
    """What `tag` packed: the state of the page."""
    packed = json.loads(value)["state"].removeprefix(PREFIX)
    state: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(packed)))
    return state


def link(uri: str, experiment_id: str, key: str) -> str:
    """Where a browser shows the view."""
    query = urllib.parse.urlencode({"compareRunsMode": "CHART", "viewStateShareKey": key})
    return f"{experiment_link(uri, experiment_id)}&{query}"


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
