"""A study or a sweep from its start to its record: folder, run in MLflow, metrics, alerts and report."""

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from scaleray.checkpoints.storage import Store
from scaleray.common.progress import Stage
from scaleray.config import RunConfig
from scaleray.config.base import without_password
from scaleray.config.idle_settings import used_settings
from scaleray.data import TRAIN
from scaleray.data.source_interface import Source
from scaleray.launch.cluster import connection as cluster
from scaleray.launch.session.alert_targets import alert_settings
from scaleray.launch.session.experiment import experiment_tags
from scaleray.launch.session.run_folder import RunFolder
from scaleray.live.live_run import LiveFile
from scaleray.live.metrics_endpoint import HOST, chosen_port
from scaleray.live.state.measured_series import Measured
from scaleray.recording import store
from scaleray.recording.measured_metrics import MeasuredMetrics
from scaleray.recording.provenance import dataset, source_tags
from scaleray.recording.study_runs import ParentRun
from scaleray.records.live_state import RUNNING, LiveState
from scaleray.records.published import RAYS_JOB, PublishedFacts
from scaleray.records.read import FILE
from scaleray.records.run_description import RunDescription
from scaleray.records.run_record import Say
from scaleray.records.study_record import StudyRecord
from scaleray.records.sweep_record import SweepRecord


@contextlib.contextmanager
def written_while(
    stage: Callable[[], Stage], folder: Path, *, kind: str, name: str, run_id: str, started_at: float
) -> Iterator[None]:
    """Keep a stage's progress in the file during the context. After an error the status remains in the file; after
    success it is in the record. stage: returns the current progress. started_at: wall clock."""
    status = RUNNING

    def state() -> LiveState:
        now = stage()
        return LiveState(
            name=name,
            kind=kind,
            status=status,
            run_id=run_id,
            run_dir=str(folder),
            started_at=started_at,
            seen_at=time.time(),
            done=now.done,
            total=now.total,
            unit=now.unit,
            left_s=now.left_s if status == RUNNING else None,
        )

    file = LiveFile(folder, state)
    file.start()
    try:
        yield
    except BaseException as exc:
        status = "KILLED" if isinstance(exc, KeyboardInterrupt) else "FAILED"
        raise
    finally:
        file.end()


Record = TypeVar("Record", StudyRecord, SweepRecord)


def check_published(config: RunConfig) -> None:
    """Raise ConfigError, before anything is started, if the port is in use or alerts cannot be delivered."""
    chosen_port(config.monitoring.port)
    alert_settings(config.alerts)


@dataclass(kw_only=True)
class Campaign:
    """The common part of a study and a sweep: many trainings with one folder, one MLflow run and one record.
    started_at: wall clock.
    """

    kind: ClassVar[Literal["study", "sweep"]]
    config: RunConfig
    folder: RunFolder
    say: Say
    started_at: float
    under_way: Stage = field(default_factory=lambda: Stage("measuring"))
    """The measurements, as a terminal shows them."""
    mlflow: ParentRun = field(init=False)
    """MLflow run of the campaign, available after `open_run`."""

    @property
    def has_run(self) -> bool:
        """Whether the MLflow run was opened."""
        return hasattr(self, "mlflow")

    def open_run(
        self,
        sources: Mapping[str, Source],
        environment: Mapping[str, Any],
        *,
        config_hash: str,
        nodes: list[dict[str, Any]],
        workers: int,
        settings: Mapping[str, Any] | None = None,
        run_id: str = "",
        uri: str = "",
    ) -> None:
        """Create the campaign's run in MLflow, or continue the one with that id. environment: with its commit under
        `git`. workers: maximum of any training. settings: more sections of the config. uri: of MLflow, if not the
        config's. Raises TrackingError."""
        config, workload = self.config, self.config.workload.name
        self.mlflow = ParentRun.open(
            store.resolve_uri(uri or config.tracking.uri),
            config.tracking.experiment,
            kind="scaling-study" if self.kind == "study" else "sweep",
            name=self.folder.name,
            config=used_settings(config, config.strategy.name) | dict(settings or {}),
            tags={
                "scaleray.config_hash": config_hash,
                **source_tags(workload, environment.get("git") or {}),
                **experiment_tags(
                    config, environment=environment, nodes=nodes, data=sources[TRAIN].describe(), workers=workers
                ),
            },
            datasets=[dataset(name, source.describe(), workload=workload) for name, source in sources.items()],
            continue_run_id=run_id or None,
            started_at=self.started_at,
        )

    def measured(self) -> Measured:
        """Number of points or trials so far, for Prometheus."""
        raise NotImplementedError

    def shown_in_its_folder(self) -> contextlib.AbstractContextManager[None]:
        """Show the progress of the measurements in live.json during the context."""
        return written_while(
            lambda: self.under_way,
            Path(self.folder.work_dir),
            kind=self.kind,
            name=self.folder.name,
            run_id=self.mlflow.run_id,
            started_at=self.started_at,
        )

    @contextlib.contextmanager
    def published(self) -> Iterator[MeasuredMetrics]:
        """Publish measurements and check alert rules during the context. Raises the errors of `check_published`."""
        config, folder = self.config, self.folder
        alerts, webhook = alert_settings(config.alerts)
        port = chosen_port(config.monitoring.port)
        description = RunDescription(
            tracking_uri="",
            experiment=config.tracking.experiment,
            run_name=folder.name,
            work_dir=folder.work_dir,
            run_path=folder.path,
            every_steps=1,
            params={},
            tags={},
            files={},
            key=self.mlflow.run_id,
            strategy=config.strategy.name,
            alerts=alerts,
            webhook=webhook,
            published=PublishedFacts(port=port, job=os.environ.get(RAYS_JOB, "")),
        )
        metrics = MeasuredMetrics(self.measured, description=description, parent=self.mlflow, say=self.say)
        metrics.publish = _rays_nodes(config)
        if port is not None:
            self.say(f"  metrics for Prometheus: http://{HOST}:{port}/metrics")
        metrics.begin()
        status = "FAILED"
        try:
            yield metrics
            status = "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            metrics.leave(status)

    def write_with(self, record: Record, write_report: Callable[[Record, Path], list[Path]], status: str) -> Record:
        """Write the record and its report to the folder and to MLflow. Returns the record with these locations."""
        record = dataclasses.replace(self.mlflow.identify(record), folder=without_password(self.folder.path))
        here: Path = Path(self.folder.work_dir)
        for root in {self.folder.path, str(here)}:
            Store(root).write_record(FILE, record.to_json(), record.tracking_uri)
        files = [here / FILE, *write_report(record, here)]
        if missing := self.mlflow.finish(record, status=status, files=files):
            self.say(f"warning: {missing}; the record in the folder is complete: {record.folder}")
        return record


def _rays_nodes(config: RunConfig) -> Callable[..., None] | None:
    """Publisher to the metrics of Ray's nodes, if these accept metrics."""
    ray = sys.modules.get("ray")  # a local study does without
    if ray is None or not ray.is_initialized() or not cluster.publishes_metrics(config):
        return None
    from scaleray.training.ray_metrics import RayMetrics

    return RayMetrics().publish
