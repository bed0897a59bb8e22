"""The one table of metrics: names of MLflow and Prometheus are made of it, and code emits no others."""

import ast
import functools
import re
from pathlib import Path

import pytest

import scaleray
from scaleray.common import live_metrics, metric_names
from scaleray.common.metric import PREFIX, RUN_LABELS, Metric, prometheus_name

PACKAGE = Path(scaleray.__file__).parent
ROOT = PACKAGE.parent
TABLES = {"metric.py", "metric_names.py", "live_metrics.py"}
RECORDED = re.compile(r"[a-z][a-z0-9_]*/[a-z][a-z0-9_]*")
SECTION = re.compile(r"[a-z][a-z0-9_]*/")
UNITS = {metric.unit for metric in metric_names.TABLE}
OF_OTHERS = {
    "batch/v1", "application/json", "n/a", "launch/host", "scaleray/command", "data/packed", "gloo/transport", "archive/",
    "data/", "scaleray/", "pod/", "cluster/",
}  # fmt: skip
"""Texts that read like a metric's name, or like the section of one, and are of Kubernetes, files, pages and so on."""
STAGES_OF_A_PATH = ("distribute/", "optimise/", "validate/", "produce/")
IN_PROMETHEUS = re.compile(rf"{PREFIX}[a-z0-9_]+")


@functools.cache
def modules():
    """Every module of the package but the tables, by its path."""
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name not in TABLES]
    return {path.relative_to(PACKAGE): ast.parse(path.read_text()) for path in paths}


def texts_of(tree):
    """Every string of the code, docstrings among them, with its line; parts of f-strings alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def unknown_names(tree):
    """Texts that read like names of metrics, and which the table lacks, with their lines."""
    for line, text in texts_of(tree):
        for name in [text] * bool(RECORDED.fullmatch(text)) + IN_PROMETHEUS.findall(text):
            is_other = name in OF_OTHERS | UNITS or name.startswith(STAGES_OF_A_PATH)
            if not is_other and metric_names.find(name) is None and name not in metric_names.IN_PROMETHEUS:
                yield line, name


def put_together(tree):
    """f-strings that begin with a section of metrics, known or not, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
            begins = str(node.values[0].value)
            if SECTION.fullmatch(begins) and begins not in OF_OTHERS and begins not in STAGES_OF_A_PATH:
                yield node.lineno, begins


def made(tree):
    """Lines in which a `Metric` of the table's kind is made: MLflow's own class has the same name."""
    imported = any(
        isinstance(node, ast.ImportFrom)
        and node.module == "scaleray.common.metric"
        and "Metric" in [n.name for n in node.names]
        for node in ast.walk(tree)
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and imported and isinstance(node.func, ast.Name) and node.func.id == "Metric":
            yield node.lineno, "Metric("


@pytest.mark.parametrize("looks_for", [unknown_names, put_together, made])
def test_names_of_metrics_stand_in_the_table_alone(looks_for):
    assert [(str(path), *found) for path, tree in modules().items() for found in looks_for(tree)] == []


@pytest.mark.parametrize(
    ("code", "looks_for"),
    [
        ("log({'train/lossy': 1.0})", unknown_names),
        ("points.append(('brandnew/figure', 1.0))", unknown_names),
        ("query = 'sum(ray_scaleray_made_up)'", unknown_names),
        ("f'train/{name}'", put_together),
        ("f'brandnew/{name}'", put_together),
        ("from scaleray.common.metric import Metric\nMetric('perf/own', '1', 'words')", made),
    ],
)
def test_a_name_that_the_table_lacks_is_found(code, looks_for):
    assert len(list(looks_for(ast.parse(code)))) == 1


def test_documents_and_jobs_name_no_metric_of_prometheus_that_there_is_not():
    files = [*ROOT.glob("docs/*.md"), ROOT / "README.md", *ROOT.glob("jobs/**/*.py"), *ROOT.glob("jobs/**/*.sh")]
    named = {(path.name, name) for path in files for name in IN_PROMETHEUS.findall(path.read_text())}
    assert len(named) > 40 and {one for one in named if one[1] not in metric_names.IN_PROMETHEUS} == set()


def test_the_page_on_monitoring_names_metrics_of_mlflow_that_there_are():
    words = re.findall(r"`([a-z]+/[a-z0-9_]+)`", (ROOT / "docs" / "monitoring.md").read_text())
    known = {metric.name.partition("/")[0] for metric in metric_names.TABLE}
    assert [word for word in words if word.partition("/")[0] in known and metric_names.find(word) is None] == []


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
