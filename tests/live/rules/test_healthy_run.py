"""Five minutes of a healthy run with every metric that there is: no rule of the file is raised."""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml
from optional_programs import needs, program
from rule_cases import EVERY_S, GPU, RUN, TWO, noisy, steps_end, still
from test_rules import in_promtool

from scaleray.common import live_metrics as live
from scaleray.common import metric_names as names
from scaleray.common.metric import prometheus_name
from scaleray.live import foreign
from scaleray.live.rules.rule_evaluator import RULES
from scaleray.live.rules.rule_files import files

COUNT = 61
GIB = 2.0**30
HEALTHY = {
    prometheus_name(metric): points
    for metric, points in {
        names.LOSS: [2.0 + 3.0 * 0.98**number for number in range(COUNT)],
        names.GRAD_NORM: noisy(1, COUNT),
        names.NONFINITE_STEPS: still(0, COUNT),
        names.LOSS_SCALE: still(65536, COUNT),
        names.STEP_TIME_S: noisy(0.1, COUNT, spread=0.01),
        names.SAMPLES_PER_S: noisy(80, COUNT, spread=8),
        names.INPUT_WAIT_SHARE: still(0.02, COUNT),
        names.WORKERS: still(2, COUNT),
        names.CHECKPOINT_DURATION_S: still(1, COUNT),
        live.LATENESS_S: noisy(0.002, COUNT, spread=0.001),
        live.LINK_RATIO: noisy(0.9, COUNT, spread=0.05),
        live.SLOWEST_LINK: still(0.9, COUNT),
        live.EXPOSED_COMMUNICATION_SHARE: still(0.1, COUNT),
        live.EFFICIENCY_OVER_PREDICTION: noisy(0.95, COUNT, spread=0.05),
        live.LAST_STEP_TIMESTAMP_S: steps_end(COUNT),
        live.LONG_PHASE_TIMESTAMP_S: still(100, COUNT),
        live.STEPS: [50.0 * number for number in range(COUNT)],
        live.STEPS_PLANNED: still(10_000, COUNT),
        live.CHECKPOINT_AGE_S: [float(EVERY_S * (number % 12)) for number in range(COUNT)],
        live.CHECKPOINT_INTERVAL_S: still(60, COUNT),
        live.MEMORY_BYTES: noisy(40 * GIB, COUNT, spread=GIB / 4),
        live.MEMORY_LIMIT_BYTES: still(80 * GIB, COUNT),
        live.RECORDER_SPOOLED_POINTS: still(0, COUNT),
        live.RESTARTS: still(0, COUNT),
        live.DISK_FREE: still(0.6, COUNT),
        live.RUN_FINISHED: still(0, COUNT),
        live.RUN_FAILED: still(0, COUNT),
    }.items()
}
"""What rules look at; of all other metrics any value will do."""
OF_GPUS = {foreign.GPU_ENGINE_ACTIVE.name: still(0.9, COUNT)}


def every_series():
    """(series in promtool's notation, its points): of two ranks, and of each kind, phase and so on one."""
    for name, metric in names.IN_PROMETHEUS.items():
        for rank in TWO if metric.is_by_rank else ("",):
            labels = {
                label: {"rank": rank, "node": "here", "kind": "used"}.get(label, "0") for label in metric.all_labels
            }
            yield _notation(name, {**labels, **RUN}), HEALTHY.get(name, still(1, COUNT))
    for metric in foreign.OF_GPUS:
        yield _notation(metric.name, GPU), OF_GPUS.get(metric.name, still(0, COUNT))


def _notation(name, labels):
    inside = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"{name}{{{inside}}}"


def played(folder, changed=None):
    """What promtool says of the whole file where no alert is expected at any minute. changed: points in place of the
    healthy ones, by name."""
    (folder / "alerts.yaml").write_text(files()["alerts.yaml"])
    changed = changed or {}
    given = [
        {"series": series, "values": in_promtool(changed.get(series.partition("{")[0], points))}
        for series, points in every_series()
    ]
    looks = [
        {"eval_time": f"{at}s", "alertname": rule.alertname, "exp_alerts": []}
        for rule in RULES
        for at in range(60, 301, 60)
    ]
    test = {"interval": f"{EVERY_S}s", "input_series": given, "alert_rule_test": looks}
    tests = {"rule_files": ["alerts.yaml"], "evaluation_interval": f"{EVERY_S}s", "tests": [test]}
    (folder / "tests.yaml").write_text(yaml.safe_dump(tests, width=10_000))
    return subprocess.run(
        [program("promtool"), "test", "rules", "tests.yaml"], cwd=folder, capture_output=True, text=True
    )


def test_what_rules_look_at_has_values_of_its_own():
    asked = set(re.findall(r"\bray_scaleray_\w+", files()["alerts.yaml"]))
    assert asked <= HEALTHY.keys() <= names.IN_PROMETHEUS.keys()


@needs("promtool")
def test_a_healthy_run_raises_nothing_in_five_minutes(tmp_path):
    done = played(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@needs("promtool")
@pytest.mark.parametrize("name", [live.DISK_FREE, names.INPUT_WAIT_SHARE], ids=lambda metric: metric.name)
def test_one_figure_that_is_not_healthy_is_found_among_them(tmp_path, name):
    done = played(tmp_path, {prometheus_name(name): [*noisy(0.9, 30, spread=0.05), *still(0.02, 31)]})
    assert done.returncode == 1 and "got:" in done.stdout + done.stderr
