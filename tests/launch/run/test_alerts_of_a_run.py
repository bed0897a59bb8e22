"""Alerts of whole trainings in this process: what a user sees, what is stored, and what they ask of the training."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from receiver import receiving
from small_runs import DEFAULTS, Classify
from waiting import wait_until

from scaleray.checkpoints.catalog import Catalog
from scaleray.config import load_config
from scaleray.errors import ConfigError, LeftEarly, StepFailedError
from scaleray.launch.run.train import train
from scaleray.launch.session.alert_targets import alert_settings
from scaleray.live import run_alerts
from scaleray.records.alert_record import parse_alerts
from scaleray.records.run_record import EventRecord, RunRecord

SECRET = "xyzzy"


class NotFinite(Classify):
    """Its loss is not finite in one step, and later steps wait for what that is to have caused."""

    def __init__(self, until=lambda: True):
        super().__init__(26)
        self.steps, self.until, self.has_waited = 0, until, False

    def loss(self, model, batch):
        loss, count = super().loss(model, batch)
        if model.training:
            self.steps += 1
        if self.steps == 3:
            loss = loss * float("nan")
        if self.steps > 5 and not self.has_waited:
            wait_until(self.until, seconds=60)
            self.has_waited = True
        return loss, count


def flags_of(folder, uri, **flags):
    return {**DEFAULTS, "workload.name": "x:NotFinite", "stop.after": "40 steps", "on_nonfinite": "skip", "tracking.uri": uri,
            "checkpoint.storage_path": str(folder / "runs"), "checkpoint.every_minutes": 1000, **flags}  # fmt: skip


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(run_alerts, "LOOK_EVERY_S", 0.05)


def everything_below(folder):
    return b"".join(path.read_bytes() for path in Path(folder).rglob("*") if path.is_file())


@pytest.mark.combination
def test_an_alert_of_a_training_reaches_terminal_mlflow_record_and_webhook_and_its_secret_nobody(
    tmp_path, uri, monkeypatch
):
    shown = []
    with receiving() as receiver:
        workload = NotFinite(until=lambda: receiver.bodies)
        monkeypatch.setenv("MY_HOOK", receiver.url(f"/{SECRET}"))
        config = load_config(flags=flags_of(tmp_path, uri, **{"alerts.webhook_env": "MY_HOOK"}), environ={})
        record = train(config, workload, local=True, show=shown.extend)
    assert {"imports", "first step"} <= record.start.keys() and "Ray" not in record.start
    assert receiver.names() == ["nonfinite firing", "run_finished firing"] and receiver.paths == [f"/{SECRET}"] * 2
    events = [message.text for message in shown if isinstance(message, EventRecord)]
    assert (
        len(
            [
                text
                for text in events
                if text.startswith("alert nonfinite (critical): a loss or gradient was not finite in 1 of")
            ]
        )
        == 1
    )
    kept = RunRecord.from_json((Path(record.run_dir) / "record.json").read_text())
    assert [alert["name"] for alert in kept.alerts] == ["nonfinite"] and "alerts: nonfinite" in repr(record)
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        tags = dict(database.execute("select key, value from tags").fetchall())
    assert (
        tags["scaleray.alert.nonfinite"].startswith("firing: a loss")
        and "| alerts | nonfinite |" in tags["mlflow.note.content"]
    )
    assert SECRET.encode() not in everything_below(tmp_path)


@pytest.mark.combination
def test_a_webhook_in_the_config_is_stored_without_its_secret(tmp_path, uri):
    shown = []
    with receiving() as receiver:
        hook = receiver.url(f"/{SECRET}")
        config = load_config(
            flags=flags_of(tmp_path, uri, **{"alerts.webhook": hook, "alerts.without": ["nonfinite"]}), environ={}
        )
        record = train(config, NotFinite(), local=True, show=shown.extend)
    assert receiver.names() == ["run_finished firing"] and SECRET.encode() not in everything_below(tmp_path)
    assert json.loads(json.dumps(record.config))["alerts"]["webhook"] == f"http://127.0.0.1:{receiver.port}/***"


HANGS_ON = {"alerts.timeout_s": 600}


@pytest.mark.always("never answers")
@pytest.mark.parametrize(
    ("answer", "settings", "problem"),
    [
        pytest.param(500, {}, "HTTP status 500 (attempt 2 of 2)", id="answers 500"),
        pytest.param(None, {"alerts.timeout_s": 0.1}, "no answer within 0.1 s (attempt 2 of 2)", id="never answers"),
        pytest.param(None, HANGS_ON, "", id="never answers, and is waited for at the end"),
    ],
)
def test_a_training_ends_well_whatever_becomes_of_its_webhook(tmp_path, uri, monkeypatch, answer, settings, problem):
    monkeypatch.setattr(run_alerts, "END_WAIT_S", 1.0)
    monkeypatch.setattr(run_alerts, "FIRST_PAUSE_S", 0.01)
    shown, given = [], {"alerts.attempts": 2, **settings}
    with receiving(answers=[answer]) as receiver:
        hook = receiver.url(f"/{SECRET}")
        flags = flags_of(tmp_path, uri, **{"alerts.webhook": hook, **given})
        workload = NotFinite(until=lambda: len(receiver.bodies) >= (1 if settings is HANGS_ON else 2))
        record = train(load_config(flags=flags, environ={}), workload, local=True, show=shown.extend)
        events = [message.text for message in shown if isinstance(message, EventRecord)]
    failures = [text for text in events if "was not delivered to" in text]
    assert record.status == "FINISHED" and [alert["name"] for alert in record.alerts] == ["nonfinite"]
    assert len(failures) == bool(problem) and all(problem in text for text in failures)
    assert SECRET not in "".join(events) and SECRET.encode() not in everything_below(tmp_path)


class UntilSaved(NotFinite):
    """Trains until there is a checkpoint, which nothing but an alert makes so early."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def loss(self, model, batch):
        if Catalog.of_run(str(self.folder)).steps():
            raise InterruptedError("there is one")
        return super().loss(model, batch)


def test_an_alert_can_make_a_checkpoint(tmp_path, uri):
    flags = {"alerts.action": {"nonfinite": "checkpoint"}, "tracking.run_name": "one", "stop.after": "1000000 steps"}
    config = load_config(flags=flags_of(tmp_path, uri, **flags), environ={})
    with pytest.raises(StepFailedError, match="there is one"):
        train(config, UntilSaved(tmp_path / "runs" / "one"), local=True)
    alert = next(alert for alert in parse_alerts((tmp_path / "runs" / "one" / "alerts.jsonl").read_text()))
    assert (alert.name, alert.action) == ("nonfinite", "checkpoint")


@pytest.mark.combination
def test_an_alert_can_stop_a_training_which_saves_before_and_says_why(tmp_path, uri):
    folder = tmp_path / "runs" / "one"
    flags = flags_of(
        tmp_path,
        uri,
        **{"alerts.action": {"critical": "stop"}, "tracking.run_name": "one", "stop.after": "100000 steps"},
    )
    with pytest.raises(
        LeftEarly, match=r"stopped by the alert nonfinite \(critical\): a loss or gradient was not finite in 1 of"
    ):
        train(load_config(flags=flags, environ={}), NotFinite(), local=True)
    record = RunRecord.from_json((folder / "record.json").read_text())
    assert record.status == "KILLED" and record.verdict.startswith("stopped by the alert nonfinite")
    assert Catalog.of_run(str(folder)).steps()


def with_alerts(**values):
    flags = {**DEFAULTS, "workload.name": "m:V", **{f"alerts.{key}": value for key, value in values.items()}}
    return load_config(flags=flags, environ={}).alerts


def test_the_address_may_stand_in_the_environment_alone(monkeypatch):
    monkeypatch.setenv("MY_HOOK", f" https://h.example/{SECRET}\n")
    settings, address = alert_settings(with_alerts(webhook_env="MY_HOOK"))
    assert address == f"https://h.example/{SECRET}" and SECRET not in repr(settings)


@pytest.mark.parametrize(
    ("values", "value", "words"),
    [
        ({"webhook_env": "MY_HOOK"}, None, ["alerts.webhook_env is 'MY_HOOK'", "not set", "export it"]),
        ({"webhook_env": "MY_HOOK"}, f"h.example/{SECRET}", ["does not begin with http:// or https://"]),
        ({"command": ["no-such-program"]}, None, ["alerts.command is 'no-such-program'", "no such program"]),
    ],
)
def test_what_cannot_be_reached_is_refused_before_workers_start(values, value, words, monkeypatch):
    if value is not None:
        monkeypatch.setenv("MY_HOOK", value)
    with pytest.raises(ConfigError) as raised:
        alert_settings(with_alerts(**values))
    assert all(word in str(raised.value) for word in words) and SECRET not in str(raised.value), str(raised.value)


def test_a_training_whose_alerts_reach_nobody_reads_no_data_and_leaves_no_folder(tmp_path, uri, monkeypatch):
    monkeypatch.delenv("MY_HOOK", raising=False)
    workload = NotFinite(until=list)
    monkeypatch.setattr(workload, "datasets", lambda: pytest.fail("it should not come so far"))
    config = load_config(flags=flags_of(tmp_path, uri, **{"alerts.webhook_env": "MY_HOOK"}), environ={})
    with pytest.raises(ConfigError, match="this variable is not set"):
        train(config, workload, local=True)
    assert not (tmp_path / "runs").exists()
