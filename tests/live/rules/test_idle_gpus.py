"""Whose GPU an idle one is: exporters and runs have addresses of their own."""

from __future__ import annotations

import subprocess

import pytest
import yaml
from optional_programs import needs, program
from rule_cases import EVERY_S, RUN

from scaleray.live.dashboards.dashboard_files import ITS_NODE, config
from scaleray.live.rules.gpu_rules import ACTIVE
from scaleray.live.rules.rule_evaluator import BY_NAME
from scaleray.live.rules.rule_files import as_yaml, labels

RULE = BY_NAME["gpu_idle"]
CASES = [
    pytest.param({"instance": "10.0.0.1:9400"}, {"node": "10.0.0.1"}, "10.0.0.1", id="by the exporter's address"),
    pytest.param(
        {"instance": "10.9.0.7:9400", "node": "10.0.0.1"}, {"node": "10.0.0.1"}, "10.0.0.1", id="by its label"
    ),
    pytest.param({"instance": "10.0.0.1:9400", "node": "10.0.0.2"}, {"node": "10.0.0.1"}, None, id="another node"),
    pytest.param({"instance": "10.9.0.7:9400"}, {"node": "10.0.0.1"}, None, id="an address that nobody knows"),
    pytest.param({"instance": "box:9400"}, {"node": "local", "instance": "box:9464"}, "box", id="without Ray"),
    pytest.param(
        {"instance": "box:9400", "node": "box"},
        {"node": "local", "instance": "box:9464"},
        "box",
        id="without Ray, labelled",
    ),
    pytest.param({"instance": "box:9400"}, {"node": "local", "instance": "den:9464"}, None, id="another machine"),
]


@needs("promtool")
@pytest.mark.parametrize(("exporter", "run", "node"), CASES)
def test_a_gpu_is_idle_where_a_run_trains_on_its_node(exporter, run, node, tmp_path):
    gpu = {"gpu": "0", "UUID": "GPU-0", **exporter}
    given = [
        {"series": f"{ACTIVE}{_inside(gpu)}", "values": "0.1x130"},
        {
            "series": f"ray_scaleray_last_step_timestamp_seconds{_inside({**RUN, 'rank': '0', **run})}",
            "values": f"0+{EVERY_S}x130",
        },
    ]
    expected = [{"exp_labels": {**gpu, "node": node, **labels(RULE)}}] if node else []
    look = {"eval_time": "640s", "alertname": RULE.alertname, "exp_alerts": expected}
    rule = {key: value for key, value in as_yaml(RULE).items() if key != "annotations"}
    (tmp_path / "rule.yaml").write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": [rule]}]}))
    test = {"interval": f"{EVERY_S}s", "input_series": given, "alert_rule_test": [look]}
    tests = {"rule_files": ["rule.yaml"], "evaluation_interval": f"{EVERY_S}s", "tests": [test]}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests))
    done = subprocess.run(
        [program("promtool"), "test", "rules", "tests.yaml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _inside(labels):
    return "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"


@needs("promtool")
def test_prometheus_takes_the_configuration_that_gives_exporters_a_node(tmp_path):
    written = config(gpu_targets=["10.0.0.1:9400"])
    assert written["scrape_configs"][0]["relabel_configs"] == [ITS_NODE]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(written))
    command = [program("promtool"), "check", "config", "prometheus.yml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
