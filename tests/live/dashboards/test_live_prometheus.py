"""Every query of the dashboards is asked of a Prometheus that scrapes two live runs, one on Ray and one without it.

GPUs are those of a stand-in for NVIDIA's exporter, and a slow link is what a recorder hears of one: the measurement itself
is tested beside its code. What studies and sweeps fill is in `test_live_studies.py`.
"""

from __future__ import annotations

import contextlib
import re

import pytest
from live_queries import OF_MEASURED, PANELS, PATIENCE_S, filled, labels_that_are_missing, values_of, without_values
from live_states import describe, step
from optional_programs import needs
from waiting import wait_until

from jobs import watch
from jobs.benchmarks.stand_in_gpus import StandInGpus, exporting
from scaleray.launch.cluster.head import local_head
from scaleray.launch.cluster.own_ray import free_port
from scaleray.live.dashboards.dashboard_files import DASHBOARDS
from scaleray.live.rules import rule_files as rules
from scaleray.recording.recorder import Recorder
from scaleray.records.published import LinksMeasured, PublishedFacts

pytestmark = [pytest.mark.timeout(1500), needs("prometheus")]
WORKLOADS = "tests/live/dashboards/watched_workloads.py"
EXPECTED = (
    *("--monitoring.expected-samples-per-s", "5000", "--checkpoint.every-minutes", "0.2"),
    *("--monitoring.every-s", "1", "--monitoring.flops-per-sample", "1e6", "--study.peak-tflops", "1"),
)
ON_RAY = ("--workload.name", f"{WORKLOADS}:Streamed")
WITHOUT_RAY = (
    *("--workload.name", f"{WORKLOADS}:Tokens", "--precision.dtype", "fp16", "--scale.workers", "1"),
    *("--evaluation.every", "2 epochs"),
)
LABEL_VALUES = re.compile(r"label_values\((.*), (\w+)\)")


@contextlib.contextmanager
def run_with_a_slow_link(folder, port):
    """A recorder that serves what its run has measured of its links."""
    store = f"sqlite:///{folder / 'links.db'}"
    recorder = Recorder(describe(store, folder, run_name="links", published=PublishedFacts(port=port)))
    recorder.start()
    recorder.log([step(1), LinksMeasured(1, "2", "1", 1e6, 1e8)])
    try:
        yield
    finally:
        recorder.finish("FINISHED", metrics={}, tags={}, files={})
        recorder.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A Prometheus that scrapes two runs."""
    folder, port, of_links = tmp_path_factory.mktemp("watched"), free_port(), free_port()
    (folder / "alerts.yaml").write_text(rules.files()["alerts.yaml"])
    with contextlib.ExitStack() as stack:
        head = stack.enter_context(local_head(num_cpus=watch.CPUS))
        targets = {
            "ray_targets": [str(watch.service_discovery(head))],
            "run_targets": [f"127.0.0.1:{port}", f"127.0.0.1:{of_links}"],
            "gpu_targets": [f"127.0.0.1:{stack.enter_context(exporting(StandInGpus()))}"],
        }
        path, files = watch.found(watch.PROMETHEUS), [str(folder / "alerts.yaml")]
        found = stack.enter_context(
            watch.prometheus(path, folder, interval="2s", port=free_port(), rules=files, **targets)
        )
        stack.enter_context(watch.training(head, folder, *EXPECTED, *ON_RAY))
        (folder / "local").mkdir()
        alone = (*WITHOUT_RAY, "--monitoring.port", str(port))
        stack.enter_context(watch.training(None, folder / "local", *EXPECTED, *alone))
        stack.enter_context(run_with_a_slow_link(folder, of_links))
        yield found


def test_every_query_has_values(address):
    panels = [(name, panel) for name, panel in PANELS if panel.needs not in OF_MEASURED]
    assert without_values(address, panels) == set()


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
    assert labels_that_are_missing(address, PANELS) == {}


def test_both_runs_are_on_the_panel_of_throughput(address):
    expr, runs = panel("run", "Throughput").queries[0].expr, set()

    def both_are_seen():
        names = {one["metric"]["ray_train_run_name"] for one in values_of(address, expr)} - {"links"}
        runs.update(name.endswith("-local") for name in names)
        return runs == {True, False}

    wait_until(both_are_seen, seconds=PATIENCE_S)


def test_prometheus_can_evaluate_every_rule(address):
    (group,) = watch.ask(address, "rules")["groups"]
    assert [(rule["name"], rule["lastError"]) for rule in group["rules"] if rule["health"] != "ok"] == []


def panel(dashboard, title):
    return next(one for one in DASHBOARDS[dashboard].panels() if one.title == title)
