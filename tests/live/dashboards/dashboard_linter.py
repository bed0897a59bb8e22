"""The rules of grafana/dashboard-linter (2026-06) that concern dashboards on Prometheus, as checks of plain values.

Each takes a dashboard as Grafana reads it and gives its findings. Where the linter looks at some types of panels
alone, these look at all that have values, and counters are found by their name also where a selection has matchers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import promql_parser

Board = dict[str, Any]
NUMBERS = {"timeseries", "stat", "gauge", "bargauge", "heatmap"}
UNITS = {
    *("none", "string", "short", "percent", "percentunit", "sci", "locale"),
    *("flops", "gflops", "tflops", "pflops", "currencyUSD", "currencyEUR"),
    *("bytes", "decbytes", "bits", "kbytes", "mbytes", "gbytes", "Bps", "binBps", "bps", "pps"),
    *("watt", "kwatt", "joule", "celsius", "hertz", "ns", "µs", "ms", "s", "m", "h", "d"),
    *("dtdurationms", "dtdurations", "cps", "ops", "rps", "wps", "iops", "bool", "bool_yes_no"),
}
"""Those of the linter's list that a dashboard of trainings might need."""
RATE_INTERVAL = timedelta(milliseconds=8869990)
GLOBAL = {
    "__rate_interval": "8869990ms",
    "__interval": "4867856ms",
    "__range": "6069770ms",
    "__range_s": "9397795485",
    "__interval_ms": "7781188786",
}
VARIABLE = re.compile(r"\$(\w+)|\$\{([^}]+)\}")
COUNTS_SO_FAR = {
    "ray_scaleray_steps_total",
    "ray_scaleray_steps_repeated_total",
    "ray_scaleray_restarts_total",
    "ray_scaleray_nonfinite_steps_total",
    "ray_scheduler_failed_worker_startup_total",
    "ray_node_mem_total",
}
"""What is shown as it is: the number of a step, how often something has happened, and a size that only sounds so."""


def panels(board: Board) -> Iterator[dict[str, Any]]:
    """All panels but the headings of rows."""
    return (panel for panel in board["panels"] if panel["type"] != "row")


def targets(board: Board) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """All queries with their panels."""
    return ((panel, target) for panel in panels(board) for target in panel.get("targets", ()))


def variables(board: Board, kind: str) -> list[dict[str, Any]]:
    """The variables of a type."""
    return [one for one in board["templating"]["list"] if one["type"] == kind]


def expanded(expr: str, board: Board) -> str:
    """An expression with values in place of variables outside strings, as the linter parses it."""
    current = {one["name"]: one.get("current", {}).get("value") for one in board["templating"]["list"]}

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return GLOBAL.get(name) or (current[name] if isinstance(current.get(name), str) else name)

    parts = expr.split('"')
    return '"'.join(part if index % 2 else VARIABLE.sub(value, part) for index, part in enumerate(parts))


def walk(node: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Each node of an expression with those above it, the nearest last."""
    yield node, above
    below = [getattr(node, name, None) for name in ("expr", "lhs", "rhs", "param", "vector_selector")]
    for one in [*below, *(getattr(node, "args", None) or ())]:
        if one is not None:
            yield from walk(one, (*above, node))


def parsed(board: Board) -> Iterator[tuple[dict[str, Any], dict[str, Any], Any]]:
    """All queries that can be parsed, with their panels; what cannot is a finding of another rule."""
    for panel, target in targets(board):
        try:
            yield panel, target, promql_parser.parse(expanded(target["expr"], board))
        except ValueError:
            continue


def template_datasource(board: Board) -> Iterator[str]:
    found = variables(board, "datasource")
    if not found:
        yield "does not have a templated data source"
    for one in found:
        if one["name"] not in ("datasource", f"{one['query']}_datasource"):
            yield f"templated data source is named {one['name']}"
        if one.get("label") not in ("Data source", f"{one['query'].title()} data source"):
            yield f"templated data source is labelled {one.get('label')}"


def _template(name: str) -> Callable[[Board], Iterator[str]]:
    def rule(board: Board) -> Iterator[str]:
        one = next((one for one in board["templating"]["list"] if one["name"] == name), None)
        if one is None:
            yield f"is missing the {name} template"
            return
        if one.get("datasource", {}).get("uid") not in ("$datasource", "${datasource}"):
            yield f"{name} template should use datasource '$datasource'"
        if one["type"] != "query":
            yield f"{name} template should be a Prometheus query"
        if one.get("label") != name.title():
            yield f"{name} template should be labelled {name.title()}"
        if not one.get("multi"):
            yield f"{name} template should be a multi select"
        if one.get("allValue") != ".+":
            yield f"{name} template allValue should be '.+'"

    return rule


def template_label_promql(board: Board) -> Iterator[str]:
    for one in variables(board, "query"):
        match = re.fullmatch(r"([a-z_]+)\((.+?)(?:, *\w+)?\)", one["query"])
        if match is None or match[1] not in ("label_names", "label_values", "metrics", "query_result"):
            yield f"template {one['name']}: invalid query {one['query']}"
            continue
        try:
            promql_parser.parse(expanded(match[2], board))
        except ValueError as exc:
            yield f"template {one['name']}: {exc}"


def template_on_time_change_reload(board: Board) -> Iterator[str]:
    return (
        f"template {one['name']} is refreshed {one.get('refresh')}, not on a change of the time range"
        for one in variables(board, "query")
        if one.get("refresh") != 2
    )


def panel_datasource(board: Board) -> Iterator[str]:
    names = {one["name"] for one in variables(board, "datasource")}
    allowed = {text for name in names for text in (f"${name}", f"${{{name}}}")}
    for panel in panels(board):
        for one in (panel, *panel.get("targets", ())):
            if one.get("datasource", {}).get("uid") not in allowed:
                yield f"{panel['title']} does not use a templated data source"


def panel_title_description(board: Board) -> Iterator[str]:
    return (
        f"panel {panel['id']} lacks title or description"
        for panel in panels(board)
        if not panel.get("title") or not panel.get("description")
    )


def panel_units(board: Board) -> Iterator[str]:
    for panel in panels(board):
        field = panel["fieldConfig"]["defaults"]
        if panel["type"] in NUMBERS and not field.get("mappings") and field.get("unit") not in UNITS:
            yield f"{panel['title']} has no or an unknown unit: {field.get('unit')}"


def panel_no_targets(board: Board) -> Iterator[str]:
    return (f"{panel['title']} has no targets" for panel in panels(board) if not panel.get("targets"))


def target_promql(board: Board) -> Iterator[str]:
    for panel, target in targets(board):
        try:
            promql_parser.parse(expanded(target["expr"], board))
        except ValueError as exc:
            yield f"{panel['title']}: {target['expr']}: {exc}"


def target_rate_interval(board: Board) -> Iterator[str]:
    for panel, target, tree in parsed(board):
        for node, above in walk(tree):
            if not isinstance(node, promql_parser.MatrixSelector) or node.range == RATE_INTERVAL or not above:
                continue
            if isinstance(above[-1], promql_parser.Call) and above[-1].func.name in ("rate", "irate"):
                yield f"{panel['title']}: should use $__rate_interval: {target['expr']}"


def _target_matcher(label: str) -> Callable[[Board], Iterator[str]]:
    def rule(board: Board) -> Iterator[str]:
        for panel, target, tree in parsed(board):
            for node, _ in walk(tree):
                if isinstance(node, promql_parser.VectorSelector) and not any(
                    one.name == label and one.op == promql_parser.MatchOp.Re and one.value == f"${label}"
                    for one in node.matchers.matchers
                ):
                    yield f"{panel['title']}: {label} is not matched by ${label}: {target['expr']}"

    return rule


def target_counter_agg(board: Board) -> Iterator[str]:
    for panel, target, tree in parsed(board):
        for node, above in walk(tree):
            if not isinstance(node, promql_parser.VectorSelector) or not (node.name or "").endswith("_total"):
                continue
            call = above[-2] if len(above) > 1 and isinstance(above[-1], promql_parser.MatrixSelector) else None
            grows = isinstance(call, promql_parser.Call) and call.func.name in ("rate", "irate", "increase")
            if not grows and node.name not in COUNTS_SO_FAR:
                yield f"{panel['title']}: a counter without rate: {target['expr']}"


def uneditable_dashboard(board: Board) -> Iterator[str]:
    if board.get("editable", True):
        yield "is editable"


RULES: dict[str, Callable[[Board], Iterator[str]]] = {
    "template-datasource-rule": template_datasource,
    "template-job-rule": _template("job"),
    "template-instance-rule": _template("instance"),
    "template-label-promql-rule": template_label_promql,
    "template-on-time-change-reload-rule": template_on_time_change_reload,
    "panel-datasource-rule": panel_datasource,
    "panel-title-description-rule": panel_title_description,
    "panel-units-rule": panel_units,
    "panel-no-targets-rule": panel_no_targets,
    "target-promql-rule": target_promql,
    "target-rate-interval-rule": target_rate_interval,
    "target-job-rule": _target_matcher("job"),
    "target-instance-rule": _target_matcher("instance"),
    "target-counter-agg-rule": target_counter_agg,
    "uneditable-dashboard": uneditable_dashboard,
}


def findings(board: Board) -> list[tuple[str, str]]:
    """The rule and the words of everything that the rules find."""
    return [(name, words) for name, rule in RULES.items() for words in rule(board)]
