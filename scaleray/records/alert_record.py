"""Alerts of a run, stored as `alerts.jsonl` in its folder: one line for each start or end of an alert."""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from scaleray.common.parsing import inert_json
from scaleray.config.alerts import Severity
from scaleray.records.json_record import jsonable
from scaleray.records.start import steady_time

ALERTS_FILE = "alerts.jsonl"
"""Name of the file in the run's folder."""
State = Literal["firing", "resolved"]


@dataclass(frozen=True)
class Alert:
    """An alert that has started or ended."""

    name: str
    """Name of its rule, see docs/monitoring.md."""
    severity: Severity
    state: State
    since: float
    """Time of its start, in seconds since 1970."""
    value: float | None
    """Value measured at its start, in the unit of the summary."""
    summary: str
    action: str = "none"
    """Action taken: `stop`, `checkpoint` or `none`."""
    recorded_at: float = field(default_factory=steady_time, compare=False)

    @property
    def is_firing(self) -> bool:
        """Whether the alert is still firing."""
        return self.state == "firing"

    def to_line(self) -> str:
        """The alert as one line of JSON, with a line break."""
        return json.dumps(jsonable(dataclasses.asdict(self))) + "\n"

    def __str__(self) -> str:
        taken = {"stop": "; the run is stopped", "checkpoint": "; a checkpoint is written"}.get(self.action, "")
        if not self.is_firing:
            return f"alert {self.name} is over"
        return f"alert {self.name} ({self.severity}): {self.summary}{taken}"


def parse_alerts(text: str) -> list[Alert]:
    """Alerts of an `alerts.jsonl`, oldest first. Other lines are ignored: the last line may be incomplete, and newer
    versions may write other kinds."""
    return [alert for line in text.splitlines() if (alert := _parse(line)) is not None]


def firing(alerts: Iterable[Alert]) -> list[Alert]:
    """Alerts that are still firing, in the order of their starts."""
    newest: dict[str, Alert] = {}
    for alert in alerts:
        newest.pop(alert.name, None)
        if alert.is_firing:
            newest[alert.name] = alert
    return list(newest.values())


def counted(names: Iterable[str]) -> str:
    """Names of alerts with their counts in one line, ordered by first occurrence."""
    return ", ".join(name if times == 1 else f"{name} ({times} times)" for name, times in Counter(names).items())


def _parse(line: str) -> Alert | None:
    known = {one.name for one in dataclasses.fields(Alert)}
    try:
        values: Any = json.loads(inert_json(line))
        alert = Alert(**{key: value for key, value in values.items() if key in known})
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    return alert if alert.state in ("firing", "resolved") else None
