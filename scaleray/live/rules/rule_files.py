"""The Prometheus rules in `dashboards/alerts.yaml`, generated from the table of rules."""

from typing import Any
from urllib.parse import urlencode

import yaml

from scaleray.common.metric import RUN_LABELS
from scaleray.config.alerts import AlertLimits
from scaleray.live.dashboards.dashboard_files import panel_path
from scaleray.live.rules.rule import Rule
from scaleray.live.rules.rule_evaluator import RULES

PATH = "alerts.yaml"
"""File name in the dashboards folder."""
EVERY_S = 5
"""Seconds between two evaluations and between two scrapes: an alert arrives about four intervals after its cause."""
HEAD = """# Alerts for runs of scaleray, written by `scaleray dashboards write` from scaleray/live/rules/.
# For a scrape interval of 5 s; docs/monitoring.md explains each rule.
"""
VARIABLES = dict(zip(("var-run", "var-run_id"), RUN_LABELS, strict=True))
"""URL parameters that select a run on a dashboard, and their labels; alerts on GPUs lack them."""
IN_TEMPLATE = "".join(
    f"{{{{ with $labels.{label} }}}}&{variable}={{{{ . | urlquery }}}}{{{{ end }}}}"
    for variable, label in VARIABLES.items()
)


def files(limits: AlertLimits | None = None, *, grafana: str = "") -> dict[str, str]:
    """Rule files of the dashboards folder, by name. limits: alert thresholds, None for the defaults. grafana: base
    address of links to panels."""
    rules = [as_yaml(rule, limits, grafana=grafana) for rule in RULES]
    group = {"name": "scaleray", "interval": f"{EVERY_S}s", "rules": rules}
    return {PATH: HEAD + yaml.safe_dump({"groups": [group]}, sort_keys=False, width=110, allow_unicode=True)}


def as_yaml(rule: Rule, limits: AlertLimits | None = None, *, grafana: str = "") -> dict[str, Any]:
    """One rule in Prometheus' format."""
    return {
        "alert": rule.alertname,
        "expr": rule.query(limits or AlertLimits()),
        **({"for": f"{rule.for_s:g}s"} if rule.for_s else {}),
        "labels": labels(rule),
        "annotations": words(rule, rule.in_prometheus(), panel=panel_link(rule, IN_TEMPLATE, grafana)),
    }


def labels(rule: Rule) -> dict[str, str]:
    """Labels that identify scaleray's alerts and their subjects."""
    return {"severity": rule.severity, "source": "scaleray", "rule": rule.name}


def words(rule: Rule, summary: str, *, panel: str) -> dict[str, str]:
    """Annotations of an alert. panel: see `panel_link`."""
    return {"summary": summary, "costs": rule.costs, "what_to_do": rule.advice, "panel": panel}


def panel_link(rule: Rule, of_run: str, grafana: str = "") -> str:
    """Address of the alert's panel, or its path within Grafana if the server is unknown. of_run: see `run_in_link`."""
    return f"{grafana.rstrip('/')}{panel_path(*rule.panel)}{of_run}"


def run_in_link(run_name: str, run_id: str) -> str:
    """Part of a panel's address that selects a run."""
    known = dict(zip(VARIABLES, (run_name, run_id), strict=True))
    return "".join(f"&{urlencode({name: value})}" for name, value in known.items() if value)
