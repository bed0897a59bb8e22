"""`dashboards/alerts.yaml`, Prometheus' rules, written from the table of rules."""

from __future__ import annotations

from typing import Any

import yaml

from scaleray.config.alerts import AlertLimits
from scaleray.monitoring.dashboards.files import panel_path
from scaleray.monitoring.rules.rule import Rule
from scaleray.monitoring.rules.table import RULES

PATH = "alerts.yaml"
"""Name in the folder of dashboards."""
EVERY_S = 5
"""Seconds between two looks, and between two scrapes: an alert arrives about four of these after the event."""
HEAD = """# Alerts for runs of scaleray, written by `scaleray dashboards write` from scaleray/monitoring/rules/.
# For a scrape interval of 5 s; docs/monitoring.md says what each rule means.
"""


def files(limits: AlertLimits | None = None) -> dict[str, str]:
    """Files of the folder of dashboards, by name. limits: values from which on alerts are raised; None: the usual."""
    group = {"name": "scaleray", "interval": f"{EVERY_S}s", "rules": [as_yaml(rule, limits) for rule in RULES]}
    return {PATH: HEAD + yaml.safe_dump({"groups": [group]}, sort_keys=False, width=110, allow_unicode=True)}


def as_yaml(rule: Rule, limits: AlertLimits | None = None) -> dict[str, Any]:
    """One rule as Prometheus has it."""
    return {
        "alert": rule.alertname,
        "expr": rule.query(limits or AlertLimits()),
        **({"for": f"{rule.for_s:g}s"} if rule.for_s else {}),
        "labels": labels(rule),
        "annotations": words(rule, rule.in_prometheus(), run="{{ $labels.ray_train_run_name | urlquery }}"),
    }


def labels(rule: Rule) -> dict[str, str]:
    """Labels that tell alerts of scaleray from others, and what they are about."""
    return {"severity": rule.severity, "source": "scaleray", "rule": rule.name}


def words(rule: Rule, summary: str, *, run: str) -> dict[str, str]:
    """What a person reads of an alert. run: name of the run as an address has it; of GPUs none is known, and it is
    empty."""
    return {"summary": summary, "costs": rule.costs, "what_to_do": rule.advice, "panel": panel_link(rule, run)}


def panel_link(rule: Rule, run: str) -> str:
    """Path in Grafana of the panel that shows it."""
    return f"{panel_path(*rule.panel)}&var-run={run}"
