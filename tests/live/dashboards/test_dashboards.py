"""The dashboards are what Grafana reads, ask for metrics that exist, and say what is normal."""

import json
import re
import subprocess
from itertools import combinations
from pathlib import Path

import jsonschema
import promql_parser
import pytest
from dashboard_linter import expanded, walk
from optional_programs import needs, program

from scaleray.common import metric_names
from scaleray.common.metric import prometheus_name
from scaleray.live import foreign
from scaleray.live.dashboards.dashboard_files import DASHBOARDS, files, panel_path
from scaleray.live.dashboards.grafana import as_grafana
from scaleray.live.rules import rule_files as rules
from scaleray.live.rules.rule_evaluator import RULES

ROOT = Path(__file__).parents[3]
SCHEMA = jsonschema.Draft7Validator(
    json.loads((Path(__file__).parent / "grafana_dashboard.schema.json").read_text(encoding="utf-8"))
)
BOARDS = {name: as_grafana(dashboard) for name, dashboard in DASHBOARDS.items()}
PANELS = [(name, panel) for name, dashboard in DASHBOARDS.items() for panel in dashboard.panels()]
WITHOUT_A_NORMAL = {
    *("Progress", "Time left", "Evaluation", "Which runs", "Samples a second and worker", "Cost of the last hour"),
    *("Throughput, run by run", "Runs and their settings", "Last loss, run by run", "Evaluation, run by run"),
}
"""Panels that show what is there, whatever that is."""
each_board = pytest.mark.parametrize("name", DASHBOARDS)
each_panel = pytest.mark.parametrize(("name", "panel"), [pytest.param(*one, id=one[1].title) for one in PANELS])


def tree(expr, name):
    return promql_parser.parse(expanded(expr, BOARDS[name]))


def asked_for():
    """Names of all metrics in queries, variables and notes."""
    exprs = [(name, query.expr) for name, panel in PANELS for query in panel.queries]
    exprs += [(name, note.expr) for name, dashboard in DASHBOARDS.items() for note in dashboard.notes]
    return {
        node.name
        for name, expr in exprs
        for node, _ in walk(tree(expr, name))
        if isinstance(node, promql_parser.VectorSelector)
    }


@each_board
def test_grafanas_schema_has_no_finding(name):
    assert [error.message for error in SCHEMA.iter_errors(BOARDS[name])] == []


@pytest.mark.parametrize(
    "change",
    [
        lambda board: board.pop("annotations"),
        lambda board: board["panels"][1].update(units="s"),
        lambda board: board["panels"][1]["gridPos"].update(x=24),
        lambda board: board["panels"][1]["fieldConfig"]["defaults"].update(units="s"),
        lambda board: board["templating"]["list"][1].update(refresh="always"),
        lambda board: board["links"][0].pop("tooltip"),
    ],
)
def test_grafanas_schema_finds_what_is_wrong(change):
    board = json.loads(files()["run.json"])
    change(board)
    assert not SCHEMA.is_valid(board)


def test_the_files_of_the_repository_are_what_the_code_writes():
    differ = [
        name for name, text in {**files(), **rules.files()}.items() if (ROOT / "dashboards" / name).read_text() != text
    ]
    assert differ == [], "run scaleray dashboards write"


@each_board
def test_panels_do_not_overlap_and_have_numbers_of_their_own(name):
    panels = BOARDS[name]["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        for place in (panel["gridPos"] for panel in panels)
    ]
    assert all(not one & other for one, other in combinations(cells, 2))
    assert max(x for cell in cells for x, _ in cell) < 24


@each_board
def test_titles_are_unique_within_a_dashboard(name):
    titles = [panel.title for panel in DASHBOARDS[name].panels()]
    assert len(set(titles)) == len(titles)


@each_panel
def test_a_panel_says_what_is_normal(name, panel):
    assert panel.description.endswith(".")
    assert "Normal" in panel.description or panel.title in WITHOUT_A_NORMAL


def test_what_has_no_normal_is_still_there():
    assert {panel.title for _, panel in PANELS} >= WITHOUT_A_NORMAL


@each_panel
def test_no_panel_is_left_to_grafanas_thresholds_which_turn_red_at_80(name, panel):
    field = next(one for one in BOARDS[name]["panels"] if one["title"] == panel.title)["fieldConfig"]["defaults"]
    steps = [step["value"] for step in field["thresholds"]["steps"]]
    assert steps[0] is None and steps[1:] == sorted(steps[1:])


@each_panel
def test_queries_can_be_parsed_and_ask_for_metrics_of_the_tables_by_labels_that_they_have(name, panel):
    known = metric_names.IN_PROMETHEUS
    others = {metric.name: metric for metric in foreign.ALL}
    for query in panel.queries:
        for node, _ in walk(tree(query.expr, name)):
            if not isinstance(node, promql_parser.VectorSelector):
                continue
            assert node.name in known or node.name in others
            if node.name in known:
                asked = {matcher.name for matcher in node.matchers.matchers} - {"job", "instance"}
                assert asked <= set(known[node.name].all_labels)


@each_panel
def test_variables_in_queries_and_labels_in_legends_exist(name, panel):
    variables = {variable.name for variable in DASHBOARDS[name].variables} | {"__rate_interval", "__range"}
    for query in panel.queries:
        used = set(re.findall(r"\$([a-z_]\w*)", query.expr))
        assert used <= variables
        grouped = re.findall(r"by \(([^)]*)\)", query.expr)
        labels = {label.strip() for group in grouped for label in group.split(",")} | {"row", "id"}
        assert not grouped or set(re.findall(r"\{\{(\w+)\}\}", query.legend)) <= labels


@each_board
def test_variables_in_variables_and_notes_exist(name):
    dashboard = DASHBOARDS[name]
    known = {variable.name for variable in dashboard.variables} | {"__interval"}
    texts = [variable.query for variable in dashboard.variables] + [note.expr for note in dashboard.notes]
    assert set(re.findall(r"\$([a-z_]\w*)", " ".join(texts))) <= known


def test_every_metric_that_is_published_is_on_a_dashboard():
    assert {prometheus_name(metric) for metric in metric_names.TABLE if metric.is_in_prometheus} <= asked_for()


def test_every_metric_of_others_is_asked_for_by_a_dashboard_or_a_rule():
    texts = " ".join(files().values())
    assert [metric.name for metric in foreign.ALL if metric.name not in texts] == []


def test_no_name_of_a_metric_is_typed_where_queries_are_made():
    folder = ROOT / "scaleray" / "monitoring" / "dashboards"
    texts = {path.name: path.read_text() for path in folder.glob("*.py")}
    names = [
        *metric_names.IN_PROMETHEUS,
        *(metric.name for metric in foreign.ALL if metric not in (foreign.UP, foreign.ALERTS)),
    ]
    assert [(file, name) for file, text in texts.items() for name in names if name in text] == []


def test_a_panel_that_may_be_empty_says_why_by_the_metrics_it_asks_for():
    for name, panel in PANELS:
        asked = {
            node.name
            for query in panel.queries
            for node, _ in walk(tree(query.expr, name))
            if isinstance(node, promql_parser.VectorSelector)
        }
        sources = {metric.source for metric in foreign.ALL if metric.name in asked} - {"Prometheus"}
        expected = {"DCGM": "GPU", "Ray": "Ray", "Ray Data": "Ray Dataset"}
        assert {expected[source] for source in sources} <= {panel.needs}, panel.title


def test_counters_of_gpus_that_are_off_by_default_are_turned_on():
    lines = files()["dcgm_counters.csv"].splitlines()
    fields = [line.split(", ", 2) for line in lines if not line.startswith("#")]
    assert {name for name, *_ in fields} == {metric.name for metric in foreign.OF_GPUS}
    assert all(kind in ("gauge", "counter") and words for _, kind, words in fields)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_panel_that_an_alert_names_is_there(rule):
    dashboard, panel = rule.panel
    assert panel in {one.title for one in DASHBOARDS[dashboard].panels()}


def test_the_address_of_a_panel_leads_to_it():
    for name, panel in PANELS:
        uid, number = re.fullmatch(r"/d/([\w-]{8,40})\?viewPanel=(\d+)", panel_path(name, panel.title)).groups()
        assert BOARDS[name]["uid"] == uid
        assert [one["title"] for one in BOARDS[name]["panels"] if one["id"] == int(number)] == [panel.title]


@needs("promtool")
def test_promtool_takes_the_configuration_and_the_rules_beside_it():
    command = [program("promtool"), "check", "config", str(ROOT / "dashboards" / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(RULES)} rules found" in done.stdout
