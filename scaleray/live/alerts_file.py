"""The alerts of a run, from alerts.jsonl in its folder."""

from __future__ import annotations

import contextlib
from pathlib import Path

from scaleray.records.alert_record import ALERTS_FILE, Alert, parse_alerts


def alerts_in(folder: Path) -> list[Alert]:
    """The newest state of each alert, in the order in which they first fired."""
    text = ""
    with contextlib.suppress(OSError):
        text = (folder / ALERTS_FILE).read_text(errors="replace")
    return list({alert.name: alert for alert in parse_alerts(text)}.values())
