"""Faults, Debian's Prometheus, Alertmanager and a receiver of webhooks: what the benchmark of delivery does and says."""

from __future__ import annotations

import json

import pytest
from optional_programs import needs

from jobs.benchmarks import alerts

STRAGGLER, HEALTHY = alerts.BY_NAME["straggler"], alerts.BY_NAME["healthy"]


def run_of(fault, folder):
    run = alerts.Run(fault, folder, "http://127.0.0.1:1/itself", 60.0, alerts.StandInGpus())
    run.has_begun, run.planted_at = True, 100.0
    return run


def delivered(*told):
    return alerts.Delivered([(at, by, run, rule, "firing") for at, by, run, rule in told])


def test_an_alert_that_one_way_did_not_bring_is_a_problem(tmp_path):
    run = run_of(STRAGGLER, tmp_path)
    itself, prometheus = (110.0, "itself", "straggler", "straggler"), (120.0, "prometheus", "straggler", "straggler")
    assert alerts.problems([run], delivered(itself, prometheus)) == []
    assert alerts.live_seconds([run], delivered(itself, prometheus))["straggler"]["seconds"] == [20.0, 10.0]
    (problem,) = alerts.problems([run], delivered(itself))
    assert problem == "straggler: straggler was not delivered: [None, 10.0]"


def test_a_healthy_training_may_tell_of_its_end_alone(tmp_path):
    run = run_of(HEALTHY, tmp_path)
    end = (110.0, "itself", "healthy", "run_finished")
    assert alerts.problems([run], delivered(end)) == []
    assert alerts.problems([run], delivered(end, (105.0, "prometheus", "healthy", "worker_lost"))) == [
        "healthy: prometheus: worker_lost"
    ]
    run.has_begun = False
    assert alerts.problems([run], delivered()) == ["healthy: the training did not begin"]


def test_a_fault_that_there_is_not_is_refused():
    with pytest.raises(SystemExit, match="there is no fault nonsense; known are healthy, straggler"):
        alerts.main(["--only", "nan,nonsense"])


@pytest.mark.timeout(900)
@needs("prometheus", "prometheus-alertmanager")
def test_a_loss_that_is_not_finite_and_a_straggler_reach_the_receiver_by_both_ways(tmp_path):
    assert alerts.main(["--only", "nan,straggler", "--at-once", "2", "--results", str(tmp_path)]) == 0
    (written,) = tmp_path.glob("alerts-*.json")
    rules = json.loads(written.read_text())["rules"]
    assert {rule: len(found["seconds"]) for rule, found in rules.items()} == {"nonfinite": 2, "straggler": 2}
    assert all(second > 0 for found in rules.values() for second in found["seconds"])
