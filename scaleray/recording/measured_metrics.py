"""Metrics that a study or a sweep publishes while it runs, and its alerts.

Its trainings publish nothing themselves: their measurements are published when a repeat or trial has ended. Only the
rules that apply are checked: the end of the study or sweep, its disk, MLflow and, for the workers of a study, lateness
and memory."""

import dataclasses
import threading
from collections.abc import Callable

from scaleray.common.stop_signals import interrupt
from scaleray.config.base import without_password
from scaleray.live.publisher import Publisher
from scaleray.live.run_alerts import RunAlerts
from scaleray.live.state.measured_series import Measured, measured_series
from scaleray.live.state.rank_series import ComparedRanks
from scaleray.live.state.series import Series
from scaleray.recording.published_metrics import free_share
from scaleray.recording.study_runs import ParentRun
from scaleray.records.alert_record import Alert
from scaleray.records.mlflow_operations import LogArtifact, Operation, SetTags
from scaleray.records.published import RankSample
from scaleray.records.run_description import RunDescription
from scaleray.records.run_record import EventRecord, Say


class MeasuredMetrics(Publisher):
    """Publishes the result of `measured`, and checks it. description: description of the study or sweep in the form of
    a run's; `parent` is its page in MLflow."""

    def __init__(
        self, measured: Callable[[], Measured], *, description: RunDescription, parent: ParentRun, say: Say
    ) -> None:
        super().__init__(description.published.port)
        self.description, self._measured, self._parent, self._say = description, measured, parent, say
        self._ranks, self._lock = ComparedRanks(), threading.Lock()
        self.say = lambda text: say(f"  {text}")
        self._alerts = RunAlerts(description, series=self.series, tell=self._tell, act=self._act)

    def begin(self) -> None:
        """Begin serving, publishing and checking. Raises ConfigError for a port in use."""
        self.open()
        self._alerts.begin(self._parent.run_page)

    def take_sample(self, sample: RankSample) -> None:
        """Take a worker's sample from the repeat that has just ended."""
        with self._lock:
            self._ranks.take_sample(sample)

    def leave(self, status: str) -> None:
        """Publish this final status, named as in MLflow, wait until the page has been read once more, and stop
        serving."""
        if not self._status:
            self.end(status)
            self._alerts.end()
            self.close()

    def series(self) -> list[Series]:
        """All current series."""
        d, parent = self.description, self._parent
        links = {"mlflow_run": without_password(parent.run_page), "report": without_password(d.run_path or d.work_dir)}
        known = dataclasses.replace(
            self._measured(),
            links=links,
            job=d.published.job,
            strategy=d.strategy,
            disk_free=free_share(d.work_dir),
            waiting=parent.num_waiting,
            status=self._status,
        )
        with self._lock:
            return measured_series(known, self._ranks, run_name=d.run_name, run_id=d.run_id)

    def own_series(self) -> list[Series]:
        """All series, since no other process publishes any."""
        return self.series()

    def _tell(self, message: EventRecord | Operation) -> None:
        if isinstance(message, EventRecord):
            self._say(f"  {message.text}")
        elif isinstance(message, SetTags | LogArtifact):
            self._parent.log(message)

    def _act(self, alert: Alert) -> None:
        if alert.action == "stop":  # as Ctrl-C does: what is measured is kept
            interrupt()
