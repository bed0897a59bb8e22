"""Facts of a run that the recorder returns to the driver: its place in MLflow, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from scaleray.records.alert_record import Alert
from scaleray.records.profile_record import Goodput
from scaleray.records.run_record import WorkerSummary


@dataclass(frozen=True)
class RunIdentity:
    """Where the run is in MLflow."""

    run_id: str
    experiment_id: str
    link: str


@dataclass(frozen=True)
class Recording:
    """State of the recorder when the run has ended."""

    final_loss: float | None
    metrics: dict[str, float]
    summaries: list[WorkerSummary]
    events: list[str]
    resumed_after: list[int]
    last_step: int
    unsent_file: str | None = None
    derived: dict[str, Any] = field(default_factory=dict)
    """Derived values as the workers said that they are in use."""
    goodput: Goodput | None = None
    evaluations: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """Step and value of every evaluation, by metric."""
    alerts: list[Alert] = field(default_factory=list)
    """Alerts that began."""
