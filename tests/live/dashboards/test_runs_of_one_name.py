"""Two runs of one name, and a name of odd characters, are told apart on every panel and in every alert."""

import json
import re
import subprocess
from urllib.parse import parse_qs, urlsplit

import yaml
from optional_programs import needs, program

from scaleray.common import metric_names as names
from scaleray.common.metric import prometheus_name
from scaleray.live.dashboards.dashboard_files import DASHBOARDS
from scaleray.live.rules.rule_evaluator import BY_NAME
from scaleray.live.rules.rule_files import as_yaml
from scaleray.live.run_alerts import webhook_body
from scaleray.records.alert_record import Alert

ODD = 'a "run" {of}\\ all & sundry + 5 %, $1'
IDS = ("d1d1d1d1d1d1d1d1", "e2e2e2e2e2e2e2e2")
QUERIES = [(panel.title, query) for board in DASHBOARDS.values() for panel in board.panels() for query in panel.queries]


def test_what_is_told_by_run_is_told_by_its_id_too():
    merged = [
        (title, group)
        for title, query in QUERIES
        for group in re.findall(r"by \(([^)]*)\)", query.expr)
        if "ray_train_run_name" in group and "run_id" not in group
    ]
    assert merged == []
    assert [
        (t, q.legend) for t, q in QUERIES if "{{ray_train_run_name}}" in q.legend and "{{id}}" not in q.legend
    ] == []


@needs("promtool")
def test_prometheus_keeps_two_runs_of_one_odd_name_apart(tmp_path):
    """A query of a panel gives a series for each with its short id, and an alert of one leads to its panel."""
    throughput = next(q.expr for title, q in QUERIES if title == "Throughput").replace("$run_id", ".*")
    expr = re.sub(r"\$(job|instance)", ".+", throughput.replace('"$run"', '".*"'))
    label = json.dumps(ODD)
    series = [
        {
            "series": f'{metric}{{ray_train_run_name={label},run_id="{of}",job="a",instance="b"}}',
            "values": f"{value}x20",
        }
        for of, speed, disk in zip(IDS, (10, 20), (0.5, 0.01), strict=True)
        for metric, value in ((prometheus_name(names.SAMPLES_PER_S), speed), ("ray_scaleray_disk_free_ratio", disk))
    ]
    rule = BY_NAME["disk_nearly_full"]
    found = [
        {"labels": f'{{ray_train_run_name={label},run_id="{of}",id="{of[:4]}"}}', "value": speed}
        for of, speed in zip(IDS, (10, 20), strict=True)
    ]
    written = as_yaml(rule)
    body = webhook_body(Alert(rule.name, rule.severity, "firing", 0.0, 0.01, ""), run_name=ODD, run_id=IDS[1], link="")
    panel = body["commonAnnotations"]["panel"]
    assert parse_qs(urlsplit(panel).query)["var-run"] == [ODD]
    assert parse_qs(urlsplit(panel).query)["var-run_id"] == [IDS[1]]
    words = {**written["annotations"], "summary": "only 1% of the disk with the run folder is free", "panel": panel}
    labels = {**written["labels"], "ray_train_run_name": ODD, "run_id": IDS[1]}
    alert = {
        "eval_time": "60s",
        "alertname": rule.alertname,
        "exp_alerts": [{"exp_labels": labels, "exp_annotations": words}],
    }
    asked = {"expr": expr, "eval_time": "60s", "exp_samples": found}
    test = {"interval": "5s", "input_series": series, "promql_expr_test": [asked], "alert_rule_test": [alert]}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "one", "rules": [written]}]}))
    tests = {"rule_files": ["rules.yaml"], "evaluation_interval": "5s", "tests": [test]}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests, width=10_000))
    done = subprocess.run(
        [program("promtool"), "test", "rules", "tests.yaml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
