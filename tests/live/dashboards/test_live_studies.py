"""Every query about studies and sweeps is asked of a Prometheus that scrapes a live study and a live sweep."""

from __future__ import annotations

import contextlib

import pytest
from live_queries import OF_MEASURED, PANELS, labels_that_are_missing, values_of, without_values
from optional_programs import needs

from jobs import watch
from scaleray.launch.cluster.own_ray import free_port

pytestmark = [pytest.mark.timeout(900), needs("prometheus")]
THEIRS = [(name, panel) for name, panel in PANELS if panel.needs in OF_MEASURED]
STUDY = (
    *("study", "-c", "jobs/emulated.yaml", "--local", "--world-sizes", "1,2", "--mode", "strong,weak"),
    *("--repeats", "500", "--steps", "4", "--seconds", "0.2", "--oversubscribe", "--batch.global-size", "8"),
)
SWEEP = (
    *("sweep", "-c", "jobs/digits.yaml", "--batch-sizes", "32..128", "--rules", "linear,sqrt", "--seeds", "100"),
    *("--stop.at", "test/loss <= 2.2", "--evaluation.every", "4 steps"),
)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A Prometheus that scrapes a study and a sweep, each at a port of its own; both go on for longer than the tests."""
    folder, study, sweep = tmp_path_factory.mktemp("measured"), free_port(), free_port()
    with contextlib.ExitStack() as stack:
        targets = [f"127.0.0.1:{port}" for port in (study, sweep)]
        path = watch.found(watch.PROMETHEUS)
        found = stack.enter_context(
            watch.prometheus(path, folder, interval="2s", port=free_port(), run_targets=targets)
        )
        for words, port in ((STUDY, study), (SWEEP, sweep)):
            stack.enter_context(watch.command((*words, "--monitoring.port", str(port)), folder))
        yield found


def test_every_query_about_studies_and_sweeps_has_values(address):
    assert without_values(address, THEIRS) == set()


def test_values_are_of_points_and_trials(address):
    points = values_of(address, panel("Throughput and step time of points").queries[0].expr)
    assert {one["metric"]["workers"] for one in points} == {"1", "2"}
    trials = values_of(address, panel("Trials").queries[0].expr)
    assert {one["metric"]["rule"] for one in trials} <= {"linear", "sqrt"}


def test_legends_are_made_of_labels_that_points_and_trials_have(address):
    assert labels_that_are_missing(address, THEIRS) == {}


def panel(title):
    return next(one for _, one in THEIRS if one.title == title)
