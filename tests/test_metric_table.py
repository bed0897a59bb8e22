"""The one table of metrics: names of MLflow and Prometheus are made of it, and code emits no others."""

import ast
import re
from pathlib import Path

import pytest

import scaleray
from scaleray import live_metrics, metric_names
from scaleray.metric import PREFIX, RUN_LABELS, Metric, prometheus_name

PACKAGE = Path(scaleray.__file__).parent
TABLES = {"metric.py", "metric_names.py", "live_metrics.py"}
SECTIONS = {metric.name.partition("/")[0] for metric in metric_names.TABLE}
RECORDED = re.compile(rf"(?:{'|'.join(SECTIONS)})/[a-z][a-z0-9_]*")
OF_KUBERNETES = "batch/v1"
"""Group of Kubernetes' API that reads like a metric of a batch size."""
IN_PROMETHEUS = re.compile(rf"{PREFIX}[a-z0-9_]+")


def texts_of_the_package():
    """Every string of the code, docstrings among them, with its place; parts of f-strings alone."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name not in TABLES:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield f"{path.relative_to(PACKAGE)}:{node.lineno}", node.value


def test_every_name_in_the_code_stands_in_the_table():
    strange = [
        (place, name)
        for place, text in texts_of_the_package()
        for name in [text] * bool(RECORDED.fullmatch(text)) + IN_PROMETHEUS.findall(text)
        if metric_names.find(name) is None and name not in (*metric_names.IN_PROMETHEUS, OF_KUBERNETES)
    ]
    assert strange == []


def test_names_are_not_put_together_outside_the_table():
    beginnings = tuple(f"{section}/" for section in SECTIONS)
    put_together = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name not in TABLES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.JoinedStr)
        and isinstance(node.values[0], ast.Constant)
        and str(node.values[0].value) in beginnings
    ]
    assert put_together == []


def test_every_metric_is_published_somewhere_under_one_name():
    names = [metric.name for metric in metric_names.TABLE]
    assert len(names) == len(set(names))
    assert all(metric.published and metric.unit and metric.help for metric in metric_names.TABLE)
    published = [metric for metric in metric_names.TABLE if metric.is_in_prometheus]
    assert len(metric_names.IN_PROMETHEUS) == len(published) >= 30


def test_names_of_prometheus_have_base_units_and_counters_end_in_total():
    for name, metric in metric_names.IN_PROMETHEUS.items():
        assert re.fullmatch(r"ray_scaleray_[a-z]+(_[a-z]+)*", name), name
        assert name.endswith("_total") == (metric.kind == "counter"), name
        if metric.unit == "s":
            assert name.endswith("_seconds"), name
        if metric.unit == "bytes":
            assert name.removesuffix("_total").endswith("_bytes"), name
        assert metric.all_labels[:2] == RUN_LABELS and len(set(metric.all_labels)) == len(metric.all_labels)
        assert ("rank" in metric.all_labels) == metric.is_by_rank


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("perf/samples_per_s", "ray_scaleray_samples_per_second"),
        ("perf/step_time_s", "ray_scaleray_step_time_seconds"),
        ("perf/input_wait_share", "ray_scaleray_input_wait_ratio"),
        ("train/nonfinite_steps", "ray_scaleray_nonfinite_steps_total"),
        ("perf/workers", "ray_scaleray_world_size"),
        ("live/sent_bytes", "ray_scaleray_sent_bytes_total"),
    ],
)
def test_a_name_of_prometheus_is_made_of_that_of_mlflow(name, expected):
    assert prometheus_name(metric_names.find(name)) == expected


def test_a_metric_that_prometheus_has_not_has_no_name_there():
    with pytest.raises(KeyError, match="point/speedup"):
        prometheus_name(metric_names.POINT_SPEEDUP)


def test_a_name_is_found_by_what_stands_in_place_of_its_variable_part():
    assert metric_names.find("train/loss_critic") is metric_names.LOSS_OF
    assert metric_names.find("train/loss") is metric_names.LOSS
    assert metric_names.find("profile/backward_share") is metric_names.PART_SHARE
    assert metric_names.find("system/10.0.0.1/gpu_0_power_usage_watts") is metric_names.SYSTEM
    assert metric_names.find("train/losses") is None and metric_names.find("validation/accuracy") is None


def test_what_lives_is_in_prometheus_alone():
    assert all(metric.is_in_prometheus and not metric.is_in_mlflow for metric in live_metrics.ALL)
    assert isinstance(live_metrics.STEPS, Metric) and not set(live_metrics.ALL) & set(metric_names.ALL)
