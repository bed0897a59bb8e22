"""Queries of the dashboards, asked of a Prometheus that scrapes something alive."""

from __future__ import annotations

import re
import time

from jobs import watch
from scaleray.live.dashboards.dashboard_files import DASHBOARDS

PANELS = [(name, panel) for name, dashboard in DASHBOARDS.items() for panel in dashboard.panels()]
OF_MEASURED = {"study", "sweep", "target"}
"""What panels need that a study or a sweep fills, and no run does."""
VALUES = {
    **{"__rate_interval": "30s", "__range": "5m", "__interval": "15s", "price": "2"},
    **{"job": ".+", "instance": ".+"},
    **dict.fromkeys(("run", "run_id", "rank", "node"), ".*"),
}
PATIENCE_S = 480


def filled(expr):
    return re.sub(r"\$([a-z_]\w*)", lambda match: VALUES[match[1]], expr)


def values_of(address, expr):
    """The values of an expression now; raises where Prometheus refuses it."""
    return watch.ask(address, "query", {"query": filled(expr)})["result"]


def without_values(address, panels, patience_s=PATIENCE_S):
    """Queries of these panels that had no value at any moment: what Ray's nodes tell is gone for seconds where a loaded
    machine is late with it."""
    waiting = {(name, panel.title, query.expr) for name, panel in panels for query in panel.queries}
    deadline = time.monotonic() + patience_s
    while waiting and time.monotonic() < deadline:
        time.sleep(2)
        waiting = {one for one in waiting if not values_of(address, one[2])}
    return waiting


def labels_that_are_missing(address, panels):
    """Labels that legends name and series lack, by query."""
    wrong = {}
    for _, panel in panels:
        for query in panel.queries:
            labels = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
            missing = [labels - set(one["metric"]) for one in values_of(address, query.expr)]
            if any(missing):
                wrong[query.expr] = missing
    return wrong
