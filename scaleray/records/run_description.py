"""Facts about a run that the driver and the recorder exchange: its description, its MLflow run, and its result."""

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
    """Location of the run in MLflow."""

    run_id: str
    experiment_id: str
    link: str


@dataclass(frozen=True)
class Recording:
    """State of the recorder at the end of the run."""

    final_loss: float | None
    metrics: dict[str, float]
    summaries: list[WorkerSummary]
    events: list[str]
    resumed_after: list[int]
    last_step: int
    unsent_file: str | None = None
    derived: dict[str, Any] = field(default_factory=dict)
    """Derived values in use, as the workers reported them."""
    goodput: Goodput | None = None
    evaluations: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """Step and value of every evaluation, by metric."""
    alerts: list[Alert] = field(default_factory=list)
    """Alerts that started firing."""


@dataclass(frozen=True)
class RunDescription:
    """Facts about a run before its start. work_dir: local folder for its files."""

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
    """Start time of the run; None: the time at which `start` is called."""
    run_path: str | None = None
    """Final location of the run's files; None: `work_dir`."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The resolved config, for a resume."""
    base_dir: str | None = None
    """Folder in which a relative workload file was found."""
    continues: Mapping[str, Any] | None = None
    """Content of `run.json` of the interrupted run that this one resumes."""
    strategy: str = ""
    total_steps: int | None = None
    """Number of steps of the whole training."""
    published: PublishedFacts = field(default_factory=PublishedFacts)
    key: str = field(default_factory=lambda: secrets.token_hex(8))
    """Key of a run that does not resume another one, until MLflow has assigned an id."""
    alerts: AlertSettings = field(default_factory=lambda: AlertSettings(watch=False))
    webhook: str | None = field(default=None, repr=False)
    """Webhook address for alerts, including its secret; the one in `alerts` is ignored."""
    repeats: str = ""
    """Key shared by trainings that differ only in the seed, see `records/conditions.py`."""
    changes: Sequence[str] = ()
    """Differences from the config of the resumed run, one per line, since params of an MLflow run cannot change."""

    @property
    def run_id(self) -> str:
        """Key that distinguishes this run, in all its attempts, from others with the same name."""
        return str((self.continues or {}).get("key") or self.key)
