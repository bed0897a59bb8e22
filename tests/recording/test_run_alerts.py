"""A run that judges itself: what it sees, whom it tells, and what it asks of its workers. Looks are taken by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
from receiver import receiving
from waiting import wait_until

from scaleray.common import live_metrics as live
from scaleray.common import metric_names as names
from scaleray.common.metric import prometheus_name
from scaleray.config.alerts import AlertSettings
from scaleray.live import run_alerts
from scaleray.live.rules import series_history
from scaleray.live.rules.gpu_rules import ACTIVE
from scaleray.live.rules.rule_evaluator import RULES
from scaleray.live.rules.series_history import SeriesHistory
from scaleray.live.run_alerts import RunAlerts
from scaleray.live.signs_of_life import SignsOfLife
from scaleray.records.alert_record import parse_alerts
from scaleray.records.mlflow_operations import LogArtifact, SetTags
from scaleray.records.run_description import RunDescription
from scaleray.records.run_record import EventRecord, Heartbeat, StepRecord, SystemRecord
from scaleray.records.worker_requests import ControlRequest

LABELS = {"ray_train_run_name": "digits", "run_id": "d1"}


class Run:
    """A run whose figures are given, and everything that its alerts told."""

    def __init__(self, folder, monkeypatch, *, webhook=None, figures=(), **settings):
        folder.mkdir(exist_ok=True)
        self.folder, self.figures, self.told, self.acted, self.shown = folder, dict(figures), [], [], []
        self.history = SeriesHistory()
        self.now = 1000.0
        for module in (run_alerts, series_history):
            monkeypatch.setattr(module, "steady_time", lambda: self.now)
        monkeypatch.setattr(run_alerts, "LOOK_EVERY_S", 1e6)  # looks are taken by hand
        description = RunDescription(
            tracking_uri="", experiment="", run_name="digits", work_dir=str(folder), every_steps=1, params={}, tags={},
            files={}, alerts=AlertSettings(**settings), webhook=webhook,
        )  # fmt: skip
        self.alerts = RunAlerts(
            description,
            series=lambda: [
                (metric, {**LABELS, **labels}, value) for (metric, _), (labels, value) in self.figures.items()
            ],
            tell=self.told.append,
            act=self.acted.append,
            history=self.history,
        )
        self.alerts.show = self.shown.append
        self.alerts.begin("http://mlflow/1")

    def has(self, metric, value, rank=None):
        labels = {"rank": str(rank), "node": "a"} if rank is not None else {}
        self.figures[metric, rank] = labels, value

    def step(self, number, loss, grad_norm=1.0):
        self.now += 0.001
        self.history.take(StepRecord(number, loss, 8.0, 8, 0.1, grad_norm, 0.01, 0.0, number / 10))

    def looks(self, times=1, every_s=5.0):
        for _ in range(times):
            self.now += every_s
            self.alerts.check(self.now)

    @property
    def written(self):
        path = self.folder / "alerts.jsonl"
        return parse_alerts(path.read_text()) if path.exists() else []

    @property
    def texts(self):
        return [told.text for told in self.told if isinstance(told, EventRecord)]


def test_a_spike_between_two_looks_goes_to_terminal_mlflow_and_file(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch)
    for number in range(40):
        run.step(number, 2.0 + number % 3 / 100)
    run.looks()
    for number in range(40, 60):
        run.step(number, 9.0 if 50 <= number < 53 else 2.0)
    run.looks()
    assert (
        [(alert.name, alert.state) for alert in run.written]
        == [("loss_spike", "firing")]
        == [(a.name, a.state) for a in run.alerts.raised]
    )
    assert run.texts == [event.text for event in run.shown] and run.texts[0].startswith(
        "alert loss_spike (warning): the loss was"
    )
    tags = next(told for told in run.told if isinstance(told, SetTags)).values
    assert (
        tags["scaleray.alert.loss_spike"].startswith("firing: the loss was")
        and "| loss_spike | warning |" in tags["mlflow.note.content"]
    )
    run.looks(14)
    assert run.written[-1].state == "resolved" and run.texts[-1] == "alert loss_spike is over"
    assert run.told[-1].values["mlflow.note.content"] == "no alert" and len(run.alerts.raised) == 1


HEALTHY = {
    live.LAST_STEP_TIMESTAMP_S: lambda now: now, live.LONG_PHASE_TIMESTAMP_S: lambda now: now - now % 60,
    live.STEPS: lambda now: 4 * now, live.STEPS_PLANNED: lambda now: 1e6, live.RUN_FINISHED: lambda now: 0.0,
    live.RUN_FAILED: lambda now: 0.0, live.RESTARTS: lambda now: 1.0, live.LATENESS_S: lambda now: 0.0005,
    live.LINK_RATIO: lambda now: 0.9 - now % 3 / 50, live.EFFICIENCY_OVER_PREDICTION: lambda now: 0.95,
    live.EXPOSED_COMMUNICATION_SHARE: lambda now: 0.2, live.MEMORY_BYTES: lambda now: 2.0**34 + now % 7 * 2**20,
    live.MEMORY_LIMIT_BYTES: lambda now: 2.0**36, live.CHECKPOINT_AGE_S: lambda now: now % 60,
    live.CHECKPOINT_INTERVAL_S: lambda now: 60.0, live.RECORDER_SPOOLED_POINTS: lambda now: 0.0,
    live.DISK_FREE: lambda now: 0.6, names.STEP_TIME_S: lambda now: 0.01 + now % 2 / 1e4, names.WORKERS: lambda now: 2.0,
    names.SAMPLES_PER_S: lambda now: 800.0 + now % 5, names.INPUT_WAIT_SHARE: lambda now: 0.02,
    names.NONFINITE_STEPS: lambda now: 3.0, names.LOSS_SCALE: lambda now: 65536.0,
    names.CHECKPOINT_DURATION_S: lambda now: 1.0, live.SLOWEST_LINK: lambda now: 0.9,
}  # fmt: skip
"""What rules look at, as it is at a time."""


def test_nothing_is_told_of_a_healthy_run(tmp_path, monkeypatch):
    assert {prometheus_name(metric) for metric in HEALTHY} == set(run_alerts.USED_METRICS.values())
    counted = {names.NONFINITE_STEPS: 3.0, live.RESTARTS: 1.0}
    figures = {(metric, None): ({}, value) for metric, value in counted.items()}
    run = Run(tmp_path, monkeypatch, figures=figures)
    for look in range(70):
        for number in range(20):
            run.step(20 * look + number, 2.0 - look / 100 + number % 5 / 50)
        for metric, at in HEALTHY.items():
            for rank in (0, 1) if metric.is_by_rank else (None,):
                run.has(metric, at(run.now + 5), rank)
        run.looks()
    run.alerts.end()
    assert run.told == [] and run.written == []


def test_actions_are_asked_for_by_name_before_severity_and_said(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch, action={"critical": "stop", "nonfinite": "checkpoint"})
    run.has(names.NONFINITE_STEPS, 1)
    run.has(live.DISK_FREE, 0.01)
    run.has(live.RECORDER_SPOOLED_POINTS, 5)
    run.looks(8)
    assert [(alert.name, alert.action) for alert in run.acted] == [
        ("nonfinite", "checkpoint"),
        ("disk_nearly_full", "stop"),
    ]
    assert {alert.name: alert.action for alert in run.written} == {
        "nonfinite": "checkpoint",
        "disk_nearly_full": "stop",
        "recorder_spooling": "none",
    }
    assert any(text.endswith("; a checkpoint is written") for text in run.texts)


def test_an_evaluation_of_minutes_is_no_hang_and_a_step_of_minutes_is(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch)
    run.has(live.LAST_STEP_TIMESTAMP_S, run.now, 0)
    run.has(names.STEP_TIME_S, 0.01, 0)
    for is_evaluation in (True, False):
        for _ in range(10):
            if is_evaluation:
                run.has(live.LONG_PHASE_TIMESTAMP_S, run.now + 5)
            run.looks()
        assert [alert.name for alert in run.written] == ([] if is_evaluation else ["no_progress"])


def test_a_rank_that_publishes_nothing_any_more_is_lost(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch)
    run.has(names.WORKERS, 2)
    for number in range(12):
        for rank in (0, 1):
            run.has(live.LAST_STEP_TIMESTAMP_S, run.now + 5, rank)
        if number > 2:
            del run.figures[live.LAST_STEP_TIMESTAMP_S, 1]
        run.looks()
    assert [alert.name for alert in run.written] == ["worker_lost"]


@pytest.mark.parametrize("measures", [True, False])
def test_links_are_measured_while_they_are_slow_and_the_pair_is_named_by_an_alert_of_its_own(
    measures, tmp_path, monkeypatch
):
    asked, life = [], SignsOfLife()
    run = Run(tmp_path, monkeypatch, measures_links=measures)
    run.alerts.measure_links = lambda: asked.append(life.ask_for_links())
    run.has(live.EXPOSED_COMMUNICATION_SHARE, 0.3)
    run.has(live.LINK_RATIO, 0.9)
    run.looks(20)
    assert asked == []
    run.has(live.LINK_RATIO, 0.3)
    run.looks(6)
    assert [alert.name for alert in run.written] == ["slow_link"] and bool(asked) is measures
    before = len(asked)
    run.looks()
    assert len(asked) == before + measures, "as long as they are slow"
    given = [life.beat(Heartbeat(rank, "a", 1, 5, "forward", 0.1)) for rank in (1, 0, 0)]
    assert given == [
        ControlRequest.NOTHING,
        ControlRequest.LINKS if measures else ControlRequest.NOTHING,
        ControlRequest.NOTHING,
    ], "once in ten minutes"
    run.figures[live.SLOWEST_LINK, None] = {"source": "1", "to": "2"}, 0.1
    run.looks()
    assert run.written[-1].summary == "the link from rank 1 to rank 2 runs at 10 % of the rate of the others"


def test_an_idle_gpu_is_found_by_what_its_node_says(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch)
    for _ in range(70):
        used = {"gpu_0_utilization_percentage": 95.0, "gpu_1_utilization_percentage": 2.0}
        run.history.take(SystemRecord("a", 1, used))
        run.looks()
    assert [(alert.name, alert.summary[:11]) for alert in run.written] == [("gpu_idle", "GPU 1 of a ")]


def test_what_a_resumed_run_counted_before_is_nothing_new(tmp_path, monkeypatch):
    run = Run(
        tmp_path, monkeypatch, figures={(names.NONFINITE_STEPS, None): ({}, 7.0), (live.RESTARTS, None): ({}, 5.0)}
    )
    run.looks(4)
    assert run.written == []
    run.has(names.NONFINITE_STEPS, 8.0)
    run.looks()
    assert [alert.name for alert in run.written] == ["nonfinite"]


def test_a_webhook_gets_alertmanagers_body_and_the_end_of_the_run(tmp_path, monkeypatch):
    with receiving() as receiver:
        run = Run(tmp_path, monkeypatch, webhook=receiver.url("/secret"))
        run.has(live.DISK_FREE, 0.01)
        run.looks()
        run.has(live.DISK_FREE, 0.5)
        run.looks(14)
        run.has(live.RUN_FINISHED, 1.0)
        run.alerts.end()
    assert receiver.names() == ["disk_nearly_full firing", "disk_nearly_full resolved", "run_finished firing"]
    first, second = receiver.bodies[0], receiver.bodies[1]
    assert first["version"] == "4" and first["receiver"] == "scaleray" and first["externalURL"] == "http://mlflow/1"
    alert = first["alerts"][0]
    assert (
        alert["labels"]
        == first["commonLabels"]
        == {
            **LABELS,
            "run_id": run.alerts.description.run_id,
            "alertname": "ScalerayDiskNearlyFull",
            "severity": "critical",
            "source": "scaleray",
            "rule": "disk_nearly_full",
        }
    )
    assert alert["annotations"]["summary"].startswith("only 1 % of the disk") and alert["annotations"]["what_to_do"]
    assert alert["startsAt"] == "1970-01-01T00:16:45.000Z" and alert["endsAt"] == "0001-01-01T00:00:00Z"
    assert (
        second["alerts"][0]["fingerprint"] == alert["fingerprint"] and second["alerts"][0]["endsAt"] > alert["startsAt"]
    )
    assert [told for told in run.told if isinstance(told, LogArtifact)] and "run_finished" not in json.dumps(run.texts)


def test_alerts_below_the_least_severity_stay_here(tmp_path, monkeypatch):
    with receiving() as receiver:
        run = Run(tmp_path, monkeypatch, webhook=receiver.url(), least="critical")
        run.has(live.DISK_FREE, 0.01)
        run.has(live.EFFICIENCY_OVER_PREDICTION, 0.1)
        run.looks(15)
        wait_until(lambda: receiver.bodies)
        run.alerts.end()
    assert receiver.names() == ["disk_nearly_full firing"]
    assert {alert.name for alert in run.written} == {"disk_nearly_full", "slower_than_predicted"}


def test_a_slip_in_one_rule_is_said_once_and_the_others_are_judged(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch)
    run.has(live.CHECKPOINT_AGE_S, 5.0)
    run.has(live.CHECKPOINT_INTERVAL_S, 5.0)
    run.alerts._evaluator.limits = run.alerts._evaluator.limits.model_copy(update={"checkpoint_intervals": None})
    run.has(live.DISK_FREE, 0.01)
    run.looks(3)
    assert [text.split(":")[0] for text in run.texts] == [
        "alerts (checkpoint_too_old)",
        "alert disk_nearly_full (critical)",
    ]


def test_a_file_that_cannot_be_written_keeps_no_alert_from_being_told(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch)
    (tmp_path / "alerts.jsonl").mkdir()
    run.has(live.DISK_FREE, 0.01)
    run.looks()
    assert [text.split(" ")[0] for text in run.texts] == ["alerts.jsonl", "alert"]


def test_an_address_without_its_secret_is_said_and_not_used(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch, webhook="https://h.example/***")
    assert run.texts == ["alerts.webhook was stored without its secret: give it again, or use alerts.webhook_env"]


@pytest.mark.parametrize("settings", [{"watch": False}, {"without": ["disk_nearly_full"]}])
def test_what_is_switched_off_is_not_judged(settings, tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch, **settings)
    run.has(live.DISK_FREE, 0.01)
    if settings.get("watch") is False:
        assert run.alerts._thread is None
    else:
        run.looks(3)
    run.alerts.end()
    assert run.written == []


def test_whatever_the_rules_look_at_is_taken_from_the_series(tmp_path, monkeypatch):
    """A metric that a predicate reads and nobody hands over would keep its rule silent for ever."""
    asked = set()

    class Asked(SeriesHistory):
        def newest(self, metric):
            asked.add(metric)
            return {"": 1.0}

        def past(self, metric, **window):
            asked.add(metric)
            return np.ones(3)

    for rule in RULES:
        if rule.predicate is not None:
            rule.predicate(Asked(now=1e4), AlertSettings())
    assert len(asked) > 10
    heard = {prometheus_name(names.LOSS), prometheus_name(names.GRAD_NORM), ACTIVE}
    assert asked <= {*run_alerts.USED_METRICS.values(), *heard}
