"""Every query of the dashboards is asked of a Prometheus that scrapes two live runs, one on Ray and one without it."""

from __future__ import annotations

import contextlib
import re
import shutil
import time

import pytest

from jobs import watch
from scaleray.launch.cluster.head import local_head
from scaleray.launch.cluster.own_ray import free_port
from scaleray.monitoring.dashboards.files import DASHBOARDS
from scaleray.monitoring.rules import files as rules

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed (Debian has it)"),
]
EMPTY_WITHOUT = {"study", "sweep", "target", "GPU", "fp16", "tokens", "Ray Dataset", "long phase"}
"""What neither run has: panels that need it are asked too, and may have no values."""
PANELS = [(name, panel) for name, dashboard in DASHBOARDS.items() for panel in dashboard.panels()]
VALUES = {
    **{"__rate_interval": "30s", "__range": "5m", "__interval": "15s", "price": "2"},
    **{"job": ".+", "instance": ".+"},
    **dict.fromkeys(("run", "run_id", "rank", "node"), ".*"),
}
EXPECTED = (
    "--monitoring.expected-samples-per-s",
    "5000",
    "--checkpoint.every-minutes",
    "0.2",
    "--evaluation.every",
    "10 epochs",
    "--monitoring.every-s",
    "1",
)
PATIENCE_S = 240
LABEL_VALUES = re.compile(r"label_values\((.*), (\w+)\)")


def filled(expr):
    return re.sub(r"\$([a-z_]\w*)", lambda match: VALUES[match[1]], expr)


def values_of(address, expr):
    """The values of an expression now; raises where Prometheus refuses it."""
    return watch.ask(address, "query", {"query": filled(expr)})["result"]


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A Prometheus that scrapes two runs."""
    folder, port = tmp_path_factory.mktemp("watched"), free_port()
    (folder / "alerts.yaml").write_text(rules.files()["alerts.yaml"])
    with contextlib.ExitStack() as stack:
        head = stack.enter_context(local_head(num_cpus=watch.CPUS))
        targets = {"ray_targets": [str(watch.service_discovery(head))], "run_targets": [f"127.0.0.1:{port}"]}
        path, files = watch.found(watch.PROMETHEUS), [str(folder / "alerts.yaml")]
        found = stack.enter_context(
            watch.prometheus(path, folder, interval="2s", port=free_port(), rules=files, **targets)
        )
        stack.enter_context(watch.training(head, folder, *EXPECTED))
        (folder / "local").mkdir()
        alone = ("--scale.workers", "1", "--monitoring.port", str(port))
        stack.enter_context(watch.training(None, folder / "local", *EXPECTED, *alone))
        yield found


def test_every_query_has_values(address):
    """At some moment: what Ray's nodes tell is gone for seconds where a loaded machine is late with it."""
    waiting = {
        (name, panel.title, query.expr)
        for name, panel in PANELS
        for query in panel.queries
        if panel.needs not in EMPTY_WITHOUT
    }
    deadline = time.monotonic() + PATIENCE_S
    while waiting and time.monotonic() < deadline:
        time.sleep(2)
        waiting = {one for one in waiting if not values_of(address, one[2])}
    assert waiting == set()


@pytest.mark.parametrize(("name", "panel"), [pytest.param(*one, id=f"{one[0]}: {one[1].title}") for one in PANELS])
def test_prometheus_understands_each_query_and_values_are_numbers(address, name, panel):
    for query in panel.queries:
        assert all(re.fullmatch(r"[-+.e\d]+", one["value"][1]) for one in values_of(address, query.expr)), query.expr


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_variable_has_values_to_choose_from(address, name):
    for variable in DASHBOARDS[name].variables:
        if variable.kind == "query":
            series, label = LABEL_VALUES.fullmatch(variable.query).groups()
            assert watch.ask(address, f"label/{label}/values", {"match[]": [filled(series)]}), variable.name


@pytest.mark.parametrize("name", DASHBOARDS)
def test_prometheus_understands_the_queries_of_notes(address, name):
    for note in DASHBOARDS[name].notes:
        values_of(address, note.expr)


def test_legends_are_made_of_labels_that_the_series_have(address):
    wrong = {}
    for _, panel in PANELS:
        for query in panel.queries:
            labels = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
            missing = [labels - set(one["metric"]) for one in values_of(address, query.expr)]
            if any(missing):
                wrong[query.expr] = missing
    assert wrong == {}


def test_both_runs_are_on_every_panel_of_a_run(address):
    runs = {
        one["metric"]["ray_train_run_name"] for one in values_of(address, panel("run", "Throughput").queries[0].expr)
    }
    assert sorted(name.endswith("-local") for name in runs) == [False, True]


def test_prometheus_can_evaluate_every_rule(address):
    (group,) = watch.ask(address, "rules")["groups"]
    assert [(rule["name"], rule["lastError"]) for rule in group["rules"] if rule["health"] != "ok"] == []


def panel(dashboard, title):
    return next(one for one in DASHBOARDS[dashboard].panels() if one.title == title)
