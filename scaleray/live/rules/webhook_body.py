"""The body of an alert's webhook request: Alertmanager's, version 4, so that one receiver serves both.

Source: prometheus.io/docs/alerting/latest/configuration/#webhook_config"""

from __future__ import annotations

import datetime
import hashlib
import json
from typing import Any

from scaleray.common.metric import RUN_LABELS
from scaleray.live.rules.rule_evaluator import BY_NAME
from scaleray.live.rules.rule_files import labels, panel_link, run_in_link, words
from scaleray.records.alert_record import Alert

NEVER = "0001-01-01T00:00:00Z"
"""End time of an alert that is not over, as Alertmanager writes it."""


def webhook_body(alert: Alert, *, run_name: str, run_id: str, link: str, grafana: str = "") -> dict[str, Any]:
    """One alert as a notification of Alertmanager's. link: the run's page. grafana: address of the Grafana with the
    dashboards."""
    rule = BY_NAME[alert.name]
    of_alert = {"alertname": rule.alertname, **dict(zip(RUN_LABELS, (run_name, run_id), strict=True)), **labels(rule)}
    panel = panel_link(rule, run_in_link(run_name, run_id), grafana)
    text = {**words(rule, alert.summary, panel=panel), "action": alert.action}
    text["value"] = "" if alert.value is None else f"{alert.value:.6g}"
    key = json.dumps(of_alert, sort_keys=True)
    return {
        "version": "4",
        "groupKey": f'{{}}:{{alertname="{rule.alertname}"}}',
        "truncatedAlerts": 0,
        "status": alert.state,
        "receiver": "scaleray",
        "groupLabels": {"alertname": rule.alertname},
        "commonLabels": of_alert,
        "commonAnnotations": text,
        "externalURL": link,
        "alerts": [
            {
                "status": alert.state,
                "labels": of_alert,
                "annotations": text,
                "startsAt": _moment(alert.since),
                "endsAt": NEVER if alert.is_firing else _moment(alert.recorded_at),
                "generatorURL": link,
                "fingerprint": hashlib.sha256(key.encode()).hexdigest()[:16],
            }
        ],
    }


def _moment(seconds: float) -> str:
    return (
        datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )
