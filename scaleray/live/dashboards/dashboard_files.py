"""Contents of the folder written by `scaleray dashboards write`, and the addresses of panels."""

from collections.abc import Sequence
from typing import Any

from scaleray.live.dashboards import cluster_dashboard, rank_dashboard, run_dashboard, scaling_dashboard
from scaleray.live.dashboards.grafana import as_json, panel_ids
from scaleray.live.foreign import OF_GPUS

INTERVAL = "5s"
"""Interval between scrapes, and between evaluations of the rules; an alert may lag its cause by this much."""
RAY_TARGETS = "/tmp/ray/prom_metrics_service_discovery.json"
"""File in a Ray head's --temp-dir that lists the addresses of its nodes."""
ITS_NODE = {
    "source_labels": ["node", "__address__"],
    "regex": ";([^:]+)(:.*)?",
    "target_label": "node",
    "replacement": "$1",
}
"""Relabelling rule: an exporter without the label `node` gets the host of its address."""
WRITTEN = "# Written by `scaleray dashboards write`; edit the code instead."


def config(
    *,
    ray_targets: Sequence[str] = (),
    run_targets: Sequence[str] = (),
    gpu_targets: Sequence[str] = (),
    alertmanagers: Sequence[str] = (),
    rules: Sequence[str] = (),
    interval: str = INTERVAL,
) -> dict[str, Any]:
    """A Prometheus configuration.

    ray_targets: service discovery files written by Ray heads. run_targets: addresses of runs without Ray
    (monitoring.port). gpu_targets: addresses of DCGM exporters. rules: rule files.
    """
    jobs: list[dict[str, Any]] = []
    if ray_targets:
        # the file itself says `job: ray`
        jobs.append({"job_name": "ray", "file_sd_configs": [{"files": list(ray_targets), "refresh_interval": "5s"}]})
    if run_targets:
        jobs.append({"job_name": "scaleray", "static_configs": [{"targets": list(run_targets)}]})
    if gpu_targets:
        jobs.append(
            {"job_name": "dcgm", "static_configs": [{"targets": list(gpu_targets)}], "relabel_configs": [ITS_NODE]}
        )
    result: dict[str, Any] = {"global": {"scrape_interval": interval, "evaluation_interval": interval}}
    if rules:
        result["rule_files"] = list(rules)
    if alertmanagers:
        result["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": list(alertmanagers)}]}]}
    return {**result, "scrape_configs": jobs}


def as_yaml() -> str:
    """A starter `prometheus.yml` with a Ray head, runs without Ray, GPU exporters, rules and an Alertmanager."""
    import yaml

    values = config(
        ray_targets=[RAY_TARGETS],
        run_targets=["127.0.0.1:9464"],
        gpu_targets=["127.0.0.1:9400"],
        alertmanagers=["127.0.0.1:9093"],
        rules=["alerts.yaml"],
    )
    return "\n".join(
        (
            WRITTEN,
            "# prometheus --config.file dashboards/prometheus.yml --web.listen-address 127.0.0.1:9090",
            "# Fill in the --temp-dir of the Ray head, monitoring.port of runs without Ray, and GPU exporters. If an",
            "# exporter's address differs from its node's address in Ray, add the latter to its targets as a label,",
            "# such as `labels: {node: 10.0.0.1}`; otherwise the alert for idle GPUs never fires.",
            yaml.safe_dump(values, sort_keys=False),
        )
    )


def dcgm_counters() -> str:
    """Counters needed by dashboards and rules, for `dcgm-exporter -f dcgm_counters.csv`; many are off by default."""
    lines = [f"{metric.name}, {metric.kind}, {metric.help}" for metric in OF_GPUS]
    return "\n".join((WRITTEN, "# DCGM field, type in Prometheus, help", *lines, ""))


DASHBOARDS = {
    one.name: one
    for one in (
        run_dashboard.DASHBOARD,
        rank_dashboard.DASHBOARD,
        cluster_dashboard.DASHBOARD,
        scaling_dashboard.DASHBOARD,
    )
}


def files() -> dict[str, str]:
    """Text of each file, keyed by file name."""
    return {
        **{f"{name}.json": as_json(dashboard) for name, dashboard in DASHBOARDS.items()},
        "prometheus.yml": as_yaml(),
        "dcgm_counters.csv": dcgm_counters(),
    }


def panel_path(dashboard: str, panel: str) -> str:
    """Path of a panel within Grafana, to which its alert links. Raises KeyError if there is no such panel."""
    one = DASHBOARDS[dashboard]
    return f"/d/{one.uid}?viewPanel={panel_ids(one)[panel]}"
