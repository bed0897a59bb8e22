"""Facts of a run that driver and recorder exchange: its description, its place in MLflow, and its result."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scaleray.config.alerts import AlertSettings
from scaleray.records.alert_record import Alert
from scaleray.records.profile_record import Goodput
from scaleray.records.published import PublishedFacts
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


@dataclass(frozen=True)
class RunDescription:
    """Facts of a run before its start. work_dir: a local folder for its files."""

    tracking_uri: str
    experiment: str
    run_name: str
    work_dir: str
    every_steps: int
    params: Mapping[str, Any]
    tags: Mapping[str, str]
    files: Mapping[str, str]
    """Small text artifacts by name, such as config.yaml."""
    datasets: Sequence[Mapping[str, Any]] = ()
    tokens_per_sample: int | None = None
    started_at: float | None = None
    """Wall clock of the run's start; None is when `start` is called."""
    run_path: str | None = None
    """Where the run's files end up; None is `work_dir`."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The resolved config, for a resume."""
    base_dir: str | None = None
    """Folder from which a relative workload file was found."""
    continues: Mapping[str, Any] | None = None
    """Content of `run.json` of the interrupted run that this one continues."""
    strategy: str = ""
    total_steps: int | None = None
    """Steps of the whole training."""
    published: PublishedFacts = field(default_factory=PublishedFacts)
    key: str = field(default_factory=lambda: secrets.token_hex(8))
    """Key of the run before MLflow has given it an id, if it does not continue another one."""
    alerts: AlertSettings = field(default_factory=lambda: AlertSettings(watch=False))
    webhook: str | None = field(default=None, repr=False)
    """Address for alerts, with its secret; that of `alerts` is not looked at."""
    repeats: str = ""
    """Key that it shares with trainings that differ in the seed alone, see `records/conditions.py`."""
    changes: Sequence[str] = ()
    """Differences from the config of that run, a line each. Params of an MLflow run are written once and stay."""

    @property
    def run_id(self) -> str:
        """Key that distinguishes this run from others of its name, in all its attempts."""
        return str((self.continues or {}).get("key") or self.key)
