"""Check a run while it trains, in a thread next to its recorder, and deliver its alerts.

Each check uses every step's loss and gradient norm, and the series that the run publishes. Studies and sweeps have
their own series (`measured_series.py`); their individual trainings are not checked."""

import contextlib
import dataclasses
import datetime
import hashlib
import json
import math
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scaleray.common import live_metrics as live
from scaleray.common import metric_names as names
from scaleray.common.http_client import HttpError, fetch
from scaleray.common.metric import RUN_LABELS, prometheus_name
from scaleray.common.watchers import Guard, Watcher
from scaleray.config.alerts import SEVERITIES, without_secret
from scaleray.config.base import HIDDEN
from scaleray.live.rules.rule_evaluator import BY_NAME, RuleEvaluator
from scaleray.live.rules.rule_files import labels, panel_link, run_in_link, words
from scaleray.live.rules.series_history import SeriesHistory
from scaleray.live.state.series import Series
from scaleray.records.alert_record import ALERTS_FILE, Alert
from scaleray.records.mlflow_operations import LogArtifact, Operation, SetTags
from scaleray.records.run_description import RunDescription
from scaleray.records.run_record import EventRecord
from scaleray.records.start import steady_time

MOST_WAITING = 100
"""Maximum number of alerts queued for a receiver; further ones are dropped."""
FIRST_PAUSE_S = 1.0
SHOWN_ANSWER = 200
TRIED_AGAIN = (408, 425, 429)
"""Status codes below 500 that are worth a retry."""


class DeliveryError(Exception):
    """A receiver did not accept an alert. may_later: whether another attempt may succeed."""

    def __init__(self, why: str, *, may_later: bool = True) -> None:
        super().__init__(why)
        self.may_later = may_later


class Delivery:
    """Delivers bodies to one receiver, in order, in a thread, so that failures never reach the training. The receiver's
    address is never logged, as it may contain a secret. send: makes one attempt, or raises DeliveryError.

    say: logs the first failure, and the first one after a success. pause: waits; returns true if the run is over."""

    def __init__(
        self,
        name: str,
        send: Callable[[bytes], None],
        *,
        attempts: int,
        say: Callable[[str], None],
        pause: Callable[[float], bool] | None = None,
    ) -> None:
        self.name, self.send, self.attempts, self.say = name, send, attempts, say
        self._waiting: queue.Queue[tuple[str, bytes] | None] = queue.Queue(maxsize=MOST_WAITING)
        self._is_over = threading.Event()
        self._pause = pause or self._is_over.wait
        self._has_failed = False
        self._thread = threading.Thread(target=self._deliver, name=f"scaleray-{name}", daemon=True)
        self._thread.start()

    def put(self, alert: str, body: bytes) -> None:
        """Queue an alert with its name, and return immediately."""
        try:
            self._waiting.put_nowait((alert, body))
        except queue.Full:
            self._fail(alert, f"{MOST_WAITING} others are already waiting")

    def close(self, wait_s: float) -> None:
        """Deliver the queued alerts, waiting at most this long for receivers."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(timeout=wait_s)
        self._is_over.set()

    def _deliver(self) -> None:
        while (item := self._waiting.get()) is not None and not self._is_over.is_set():
            alert, body = item
            problem = ""
            for attempt in range(self.attempts):
                if attempt and self._pause(FIRST_PAUSE_S * 2 ** (attempt - 1)):
                    problem = f"{problem}; the run is over"
                    break
                try:
                    self.send(body)
                except DeliveryError as exc:
                    problem = f"{exc} (attempt {attempt + 1} of {self.attempts})"
                    if not exc.may_later:
                        break
                except Exception as exc:  # a slip of ours must not end the deliveries
                    problem = type(exc).__name__
                else:
                    self._has_failed, problem = False, ""
                    break
            if problem:
                self._fail(alert, problem)

    def _fail(self, alert: str, problem: str) -> None:
        if not self._has_failed:
            self.say(
                f"alert {alert} was not delivered to {self.name}: {problem}; it is in alerts.jsonl of the run's folder"
            )
        self._has_failed = True


def to_webhook(address: str, *, timeout_s: float) -> Callable[[bytes], None]:
    """Function that makes one attempt to post a body to an address."""

    def send(body: bytes) -> None:
        kind = {"Content-Type": "application/json"}
        try:
            fetch(address, timeout_s=timeout_s, headers=kind, body=body, most=SHOWN_ANSWER)
        except HttpError as exc:
            if exc.status is not None:
                may_later = exc.status >= 500 or exc.status in TRIED_AGAIN
                raise DeliveryError(f"HTTP status {exc.status}", may_later=may_later) from None
            if exc.was_connected and isinstance(exc.cause, TimeoutError):
                raise DeliveryError(f"no answer within {timeout_s:g} s") from None
            # once connected, the kind alone: other texts may have the address
            why = type(exc.cause).__name__ if exc.was_connected else _why(exc.cause)
            raise DeliveryError(f"the connection failed: {why}") from None

    return send


def _why(reason: object) -> str:
    """The system's error text, which does not contain the address, or else the error's type."""
    if isinstance(reason, TimeoutError):
        return "no answer in time"
    return reason.strerror if isinstance(reason, OSError) and reason.strerror else type(reason).__name__


def to_command(command: Sequence[str], *, timeout_s: float) -> Callable[[bytes], None]:
    """Function that makes one attempt to run a command with a body on its standard input."""

    def send(body: bytes) -> None:
        try:
            done = subprocess.run(list(command), input=body, capture_output=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise DeliveryError(f"the command did not finish within {timeout_s:g} s") from None
        except OSError as exc:
            raise DeliveryError(f"the command could not be run: {exc.strerror}", may_later=False) from None
        if done.returncode:
            last = (done.stderr.decode(errors="replace").strip().splitlines() or [""])[-1][:SHOWN_ANSWER]
            raise DeliveryError(f"the command exited with code {done.returncode}" + (f": {last}" if last else ""))

    return send


def webhook_named(address: str) -> str:
    """Name of the webhook in messages."""
    return f"alerts.webhook ({without_secret(address)})"


LOOK_EVERY_S = 2.0
END_WAIT_S = 10.0
"""Seconds that the end of a run waits for the check in progress and for the delivery of its last alerts."""
SHARE_OF_A_CORE = 0.05
"""Largest share of time spent on checks: one takes almost a second for a thousand ranks, so checks become rarer."""
USED_METRICS = {
    id(metric): prometheus_name(metric)
    for metric in (
        live.LAST_STEP_TIMESTAMP_S, live.LONG_PHASE_TIMESTAMP_S, live.STEPS, live.STEPS_PLANNED, live.RUN_FINISHED,
        live.RUN_FAILED, live.RESTARTS, live.LATENESS_S, live.LINK_RATIO, live.EFFICIENCY_OVER_PREDICTION,
        live.EXPOSED_COMMUNICATION_SHARE, live.MEMORY_BYTES, live.MEMORY_LIMIT_BYTES, live.CHECKPOINT_AGE_S,
        live.CHECKPOINT_INTERVAL_S, live.RECORDER_SPOOLED_POINTS, live.DISK_FREE, names.STEP_TIME_S, names.WORKERS,
        names.SAMPLES_PER_S, names.INPUT_WAIT_SHARE, names.NONFINITE_STEPS, names.LOSS_SCALE,
        names.CHECKPOINT_DURATION_S, live.SLOWEST_LINK,
    )
}  # fmt: skip
"""Identities of the few metrics that rules use: each metric is one object in the table. Loss and gradient norm arrive
with every step."""
SLOW_LINK = "slow_link"
ENDS = ("run_failed", "run_finished")
"""Rules that only a webhook reports."""
ALERT_TAG, NOTE = "scaleray.alert.", "mlflow.note.content"


class RunAlerts:
    """The alerts of one run. series: returns the currently published series. history: receives the run's messages.
    tell: receives events and tags. act: performs the action of an alert."""

    def __init__(
        self,
        description: RunDescription,
        *,
        series: Callable[[], Sequence[Series]],
        tell: Callable[[EventRecord | Operation], None],
        act: Callable[[Alert], None],
        history: SeriesHistory | None = None,
        measure_links: Callable[[], None] = lambda: None,
    ) -> None:
        self.description, self.settings = description, description.alerts
        self._series, self._tell, self._act = series, tell, act
        self.measure_links = measure_links
        """Requests a measurement that finds the slow link."""
        self.show: Callable[[EventRecord], None] = lambda event: None
        """Receives alerts if the recorder is not polled, as in the process that trains."""
        self.raised: list[Alert] = []
        """Alerts that have begun, except those on the end of the run."""
        self._file = Path(description.work_dir) / ALERTS_FILE
        self._seen = history or SeriesHistory()
        self._guard = Guard(self._warn)
        self._evaluator = RuleEvaluator(self.settings, self._guard, without=self.settings.without)
        self._deliveries: list[Delivery] = []
        self._link = ""
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, link: str) -> None:
        """Start the checks. link: the run's page in MLflow."""
        if not self.settings.watch:
            return
        self._link, settings, address = link, self.settings, self.description.webhook
        if address is not None and address.endswith(HIDDEN):
            self._warn("alerts.webhook was stored without its secret: give it again, or use alerts.webhook_env")
        elif address is not None:
            send = to_webhook(address, timeout_s=settings.timeout_s)
            self._deliver_to(webhook_named(address), send)
        if settings.command:
            self._deliver_to("alerts.command", to_command(settings.command, timeout_s=settings.timeout_s))
        for metric, _, value in self._series():
            if metric in (names.NONFINITE_STEPS, live.RESTARTS):  # what a run that goes on has counted before
                self._seen.add(prometheus_name(metric), value, at=-math.inf)
        self._thread = threading.Thread(target=self._look_on, name="scaleray-alerts", daemon=True)
        self._thread.start()

    def end(self, *, went_on: bool = True) -> None:
        """Check one last time after the run has ended, and deliver the remaining alerts. went_on: False if the run
        failed to resume; its end was reported before."""
        self._is_over.set()
        if self._thread is None:
            return
        until = time.monotonic() + END_WAIT_S
        self._thread.join(timeout=END_WAIT_S)
        if went_on and not self._thread.is_alive():
            self._guard(Watcher.ALERTS, lambda: self.check(steady_time()), None)
        if self.raised:
            self._tell(LogArtifact(str(self._file)))
        for delivery in self._deliveries:
            delivery.close(max(0.0, until - time.monotonic()))

    def check(self, now: float) -> None:
        """Check the run's current state. now: wall clock."""
        seen = self._seen
        seen.advance(now)
        for metric, own, value in self._series():
            published = USED_METRICS.get(id(metric))
            if published is None or own.get("kind", "used") != "used":
                continue
            seen.add(published, value, at=now, of=_of(own))
        for alert in self._evaluator.check(seen):
            self._raise(alert)
        if self.settings.measures_links and any(alert.name == SLOW_LINK for alert in self._evaluator.firing):
            self.measure_links()

    def _look_on(self) -> None:
        took_s = 0.0
        while not self._is_over.wait(max(LOOK_EVERY_S, took_s / SHARE_OF_A_CORE)):
            began = time.monotonic()
            self._guard(Watcher.ALERTS, lambda: self.check(steady_time()), None)
            took_s = time.monotonic() - began

    def _raise(self, alert: Alert) -> None:
        actions, is_end = self.settings.action, alert.name in ENDS
        action = actions.get(alert.name, actions.get(alert.severity, "none"))
        if alert.is_firing and not is_end and action != "none":
            alert = dataclasses.replace(alert, action=action)
            self._act(alert)
        self._keep(alert)
        if SEVERITIES.index(alert.severity) <= SEVERITIES.index(self.settings.least):
            about = {"run_name": self.description.run_name, "run_id": self.description.run_id, "link": self._link}
            about["grafana"] = self.settings.grafana or ""
            body = json.dumps(webhook_body(alert, **about)).encode()
            for delivery in self._deliveries:
                delivery.put(alert.name, body)
        if is_end:
            return
        if alert.is_firing:
            self.raised.append(alert)
        self._say(EventRecord(str(alert), kind="warning" if alert.is_firing else "info"))
        self._tell(SetTags({f"{ALERT_TAG}{alert.name}": f"{alert.state}: {alert.summary}"[:500], NOTE: self._note()}))

    def _note(self) -> str:
        """Description of the run in MLflow during the training."""
        firing = self._evaluator.firing
        if not firing:
            return "no alert"
        rows = [f"| {alert.name} | {alert.severity} | {alert.summary} |" for alert in firing]
        return "\n".join(["| alert | severity | |", "|---|---|---|", *rows])

    def _keep(self, alert: Alert) -> None:
        try:
            with self._file.open("a") as file:
                file.write(alert.to_line())
        except OSError as exc:  # such as a full disk, of which an alert tells
            self._warn(f"{ALERTS_FILE} cannot be written ({exc.strerror})")

    def _deliver_to(self, name: str, send: Callable[[bytes], None]) -> None:
        self._deliveries.append(Delivery(name, send, attempts=self.settings.attempts, say=self._warn))

    def _warn(self, text: str) -> None:
        self._say(EventRecord(text, kind="warning"))

    def _say(self, event: EventRecord) -> None:
        self._tell(event)
        self.show(event)


def _of(labels: Mapping[str, str]) -> str:
    """Rank or link of a series, as text; empty for a series of the whole run."""
    if "rank" in labels:
        return f"rank {labels['rank']} on {labels['node']}"
    return f"rank {labels['source']} to rank {labels['to']}" if "source" in labels else ""


NEVER = "0001-01-01T00:00:00Z"
"""End time that Alertmanager writes for an alert that is not over."""


def webhook_body(alert: Alert, *, run_name: str, run_id: str, link: str, grafana: str = "") -> dict[str, Any]:
    """One alert as an Alertmanager notification, version 4, so that one receiver handles both. link: the run's page.
    grafana: address of the Grafana server with the dashboards.

    Source: prometheus.io/docs/alerting/latest/configuration/#webhook_config"""
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
