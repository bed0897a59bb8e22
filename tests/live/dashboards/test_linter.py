"""The dashboard linter's rules find nothing in our dashboards, and each of them finds what it is there for."""

import copy

import pytest
from dashboard_linter import RULES, findings

from scaleray.live.dashboards.dashboard_files import DASHBOARDS
from scaleray.live.dashboards.grafana import as_grafana

RUN = as_grafana(DASHBOARDS["run"])


def changed(change):
    board = copy.deepcopy(RUN)
    change(board)
    return board


def variable(board, name):
    return next(one for one in board["templating"]["list"] if one["name"] == name)


def first(board):
    return next(panel for panel in board["panels"] if panel["type"] == "timeseries")


def without(board, name):
    board["templating"]["list"].remove(variable(board, name))


def set_expr(expr):
    return lambda board: first(board)["targets"][0].update(expr=expr)


TARGET = 'job=~"$job",instance=~"$instance"'
MUTATIONS = [
    ("template-datasource-rule", lambda board: without(board, "datasource")),
    ("template-datasource-rule", lambda board: variable(board, "datasource").update(name="source")),
    ("template-datasource-rule", lambda board: variable(board, "datasource").update(label="Source")),
    ("template-job-rule", lambda board: without(board, "job")),
    ("template-job-rule", lambda board: variable(board, "job").update(multi=False)),
    ("template-instance-rule", lambda board: without(board, "instance")),
    ("template-instance-rule", lambda board: variable(board, "instance").update(allValue=".*")),
    ("template-instance-rule", lambda board: variable(board, "instance").update(datasource={"uid": "mine"})),
    ("template-label-promql-rule", lambda board: variable(board, "rank").update(query="label_value(up, rank)")),
    ("template-label-promql-rule", lambda board: variable(board, "rank").update(query="label_values(up{, rank)")),
    ("template-on-time-change-reload-rule", lambda board: variable(board, "run").update(refresh=1)),
    ("panel-datasource-rule", lambda board: first(board).update(datasource={"type": "prometheus", "uid": "P1"})),
    ("panel-datasource-rule", lambda board: first(board)["targets"][0].pop("datasource")),
    ("panel-title-description-rule", lambda board: first(board).update(description="")),
    ("panel-title-description-rule", lambda board: first(board).update(title="")),
    ("panel-units-rule", lambda board: first(board)["fieldConfig"]["defaults"].update(unit="seconds")),
    ("panel-units-rule", lambda board: first(board)["fieldConfig"]["defaults"].pop("unit")),
    ("panel-no-targets-rule", lambda board: first(board).pop("targets")),
    ("target-promql-rule", set_expr(f"sum(up{{{TARGET}}}")),
    ("target-promql-rule", set_expr(f"rate(up{{{TARGET}}})")),
    ("target-promql-rule", set_expr("")),
    ("target-rate-interval-rule", set_expr(f"rate(up{{{TARGET}}}[5m])")),
    ("target-job-rule", set_expr('up{instance=~"$instance"}')),
    ("target-job-rule", set_expr('up{job="$job",instance=~"$instance"}')),
    ("target-instance-rule", set_expr('up{job=~"$job"} + up{job=~"$job",instance=~"$instance"}')),
    ("target-counter-agg-rule", set_expr(f"sum(http_requests_total{{{TARGET}}})")),
    ("target-counter-agg-rule", set_expr(f"max_over_time(http_requests_total{{{TARGET}}}[1h])")),
    ("uneditable-dashboard", lambda board: board.update(editable=True)),
    ("uneditable-dashboard", lambda board: board.pop("editable")),
]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_the_linter_finds_nothing(name):
    assert findings(as_grafana(DASHBOARDS[name])) == []


@pytest.mark.parametrize(("rule", "change"), MUTATIONS)
def test_a_rule_finds_a_dashboard_that_was_changed(rule, change):
    assert rule in {name for name, _ in findings(changed(change))}


def test_every_rule_is_shown_to_find_something():
    assert {rule for rule, _ in MUTATIONS} == set(RULES)
