"""Conversion of a dashboard to Grafana's classic JSON, which versions 9 to 13 accept.

Checked against Grafana's own schema in tests. Source of the keys: grafana-foundation-sdk, jsonschema/dashboard.
"""

import json
from typing import Any

from scaleray.live.dashboards.panels import COLUMNS, Dashboard, Link, Note, Panel, Query, Row, Variable

SCHEMA_VERSION = 42
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
TAG = "scaleray"


def as_json(dashboard: Dashboard) -> str:
    """Text of a dashboard file."""
    return json.dumps(as_grafana(dashboard), indent=2, ensure_ascii=False) + "\n"


def as_grafana(dashboard: Dashboard) -> dict[str, Any]:
    """Dashboard in the form used by Grafana's HTTP API and files."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": [TAG],
        "schemaVersion": SCHEMA_VERSION,
        "editable": False,  # it is written from the code, and a change by hand would be lost
        "graphTooltip": 1,  # the same moment is marked in all panels
        "timezone": "browser",
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "links": [_other_dashboards()],
        "templating": {"list": [_variable(variable) for variable in dashboard.variables]},
        "annotations": {"list": [_built_in_note(), *(_note(note) for note in dashboard.notes)]},
        "panels": _laid_out(dashboard.rows),
    }


def panel_ids(dashboard: Dashboard) -> dict[str, int]:
    """Number of each panel by title; row headings get higher numbers."""
    return {panel.title: number for number, panel in enumerate(dashboard.panels(), start=1)}


def _laid_out(rows: tuple[Row, ...]) -> list[dict[str, Any]]:
    """Row headings and panels with their positions; a panel that does not fit starts a new line."""
    placed: list[dict[str, Any]] = []
    number, top = 0, 0
    headings = 1000  # numbers far from those of panels, which links hold
    for row in rows:
        headings += 1
        place = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        placed.append(
            {"id": headings, "type": "row", "title": row.title, "collapsed": False, "panels": [], "gridPos": place}
        )
        top, left, line = top + 1, 0, 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                top, left, line = top + line, 0, 0
            number += 1
            place = {"x": left, "y": top, "w": panel.width, "h": panel.height}
            placed.append(_panel(panel, number, place))
            left, line = left + panel.width, max(line, panel.height)
        top += line
    return placed


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    targets = [_target(query, chr(ord("A") + index), panel) for index, query in enumerate(panel.queries)]
    result: dict[str, Any] = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": _field(panel), "overrides": []},
        "options": OPTIONS[panel.kind](panel),
        "targets": targets,
    }
    if panel.kind == "table":
        shown = dict(panel.columns)
        result["transformations"] = [
            {"id": "filterFieldsByName", "options": {"include": {"names": [*shown, *panel.links_from]}}},
            {
                "id": "organize",
                "options": {"renameByName": shown, "indexByName": {name: index for index, name in enumerate(shown)}},
            },
        ]
    return result


def _target(query: Query, letter: str, panel: Panel) -> dict[str, Any]:
    is_now = panel.kind in ("table", "bargauge")
    return {
        "refId": letter,
        "datasource": DATASOURCE,
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
        "instant": is_now,
        "range": not is_now,
        "format": "table" if panel.kind == "table" else "time_series",
        "editorMode": "code",
    }


def _field(panel: Panel) -> dict[str, Any]:
    """Display options for values: unit, limits, colours, texts and links."""
    limits = {"min": panel.minimum, "max": panel.maximum, "decimals": panel.decimals}
    field: dict[str, Any] = {"unit": panel.unit, **{key: value for key, value in limits.items() if value is not None}}
    # said always: Grafana's own default turns red at 80, whatever is shown
    below = [one.colour for one in panel.thresholds if one.value == float("-inf")]
    steps = [{"value": one.value, "color": one.colour} for one in panel.thresholds if one.value > float("-inf")]
    base = {"value": None, "color": below[0] if below else "green"}
    field["thresholds"] = {"mode": "absolute", "steps": [base, *steps]}
    if panel.words:
        options = {value: {"text": word, "color": colour} for value, word, colour in panel.words}
        field["mappings"] = [{"type": "value", "options": options}]
    if panel.links:
        field["links"] = [_link(link) for link in panel.links]
    if panel.kind == "timeseries":
        field["color"] = {"mode": "palette-classic"}
        field["custom"] = {
            "lineWidth": 1,
            "fillOpacity": 30 if panel.is_stacked else 8,
            "showPoints": "auto",
            "stacking": {"mode": "normal" if panel.is_stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "dashed" if panel.thresholds else "off"},
        }
    elif panel.kind != "heatmap":
        field["color"] = {"mode": "thresholds"}
    return field


def _line_options(panel: Panel) -> dict[str, Any]:
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": ["lastNotNull"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _value_options(panel: Panel) -> dict[str, Any]:
    reduced = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    of_kind: dict[str, dict[str, Any]] = {
        "stat": {"colorMode": "value", "graphMode": "none" if panel.words else "area", "textMode": "auto"},
        "gauge": {"showThresholdMarkers": True, "showThresholdLabels": False},
        "bargauge": {"displayMode": "gradient", "orientation": "horizontal", "showUnfilled": True},
    }
    return {"reduceOptions": reduced, **of_kind[panel.kind]}


def _heat_options(panel: Panel) -> dict[str, Any]:
    """Options for a heat map with one line per series; by default, Grafana takes series for histogram buckets."""
    return {
        "calculate": False,
        "rowsFrame": {"layout": "auto", "value": panel.title},
        "color": {"mode": "scheme", "scheme": "RdYlGn" if panel.low_is_bad else "Oranges", "steps": 64},
        "cellGap": 1,
        "cellValues": {"unit": panel.unit},
        "yAxis": {"axisPlacement": "left", "reverse": True},
        "filterValues": {"le": -1},  # zeros are values here, and cells without them would look like lost ranks
        "tooltip": {"mode": "single", "yHistogram": False},
        "legend": {"show": True},
    }


def _table_options(panel: Panel) -> dict[str, Any]:
    return {"showHeader": True, "cellHeight": "sm"}


OPTIONS = {
    "timeseries": _line_options,
    "stat": _value_options,
    "gauge": _value_options,
    "bargauge": _value_options,
    "heatmap": _heat_options,
    "table": _table_options,
}


def _variable(variable: Variable) -> dict[str, Any]:
    result: dict[str, Any] = {"name": variable.name, "label": variable.label, "type": variable.kind}
    result["query"] = variable.query
    if variable.description:
        result["description"] = variable.description
    if variable.kind == "textbox":
        return {**result, "current": {"text": variable.query, "value": variable.query}}
    if variable.kind == "datasource":
        return {**result, "current": {"text": "default", "value": "default"}, "refresh": 1}
    return {
        **result,
        "definition": variable.query,
        "datasource": DATASOURCE,
        "refresh": 2,  # whenever the time range changes: runs come and go
        "sort": 3 if variable.name == "rank" else 1,
        "multi": True,
        "includeAll": True,
        "allValue": variable.all_value,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _note(note: Note) -> dict[str, Any]:
    return {
        "name": note.title,
        "datasource": DATASOURCE,
        "enable": True,
        "iconColor": note.colour,
        "expr": note.expr,
        "titleFormat": note.title,
        "textFormat": note.text,
    }


def _built_in_note() -> dict[str, Any]:
    """Annotations made by hand in Grafana."""
    return {
        "name": "Annotations & Alerts",
        "type": "dashboard",
        "builtIn": 1,
        "datasource": {"type": "grafana", "uid": "-- Grafana --"},
        "enable": True,
        "hide": True,
        "iconColor": "rgba(0, 211, 255, 1)",
    }


def _other_dashboards() -> dict[str, Any]:
    return {**_link(Link("scaleray", "")), "type": "dashboards", "tags": [TAG], "includeVars": True, "keepTime": True}


def _link(link: Link) -> dict[str, Any]:
    return {
        "title": link.title,
        "type": "link",
        "url": link.url,
        "icon": "external link",
        "tooltip": "",
        "tags": [],
        "asDropdown": False,
        "targetBlank": True,
        "includeVars": False,
        "keepTime": False,
    }
