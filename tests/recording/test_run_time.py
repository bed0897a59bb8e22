"""Goodput over the attempts of a run: what the recorder hears, and what the next one finds."""

from __future__ import annotations

import time

import pytest

from scaleray.live.state.run_state import RunState
from scaleray.recording.recorder import GoodputFile
from scaleray.records.run_description import RunDescription
from scaleray.records.run_record import CheckpointRecord, EvaluationRecord, EventRecord, StepRecord


def described(tmp_path, started_at, *, continues=None):
    return RunDescription(
        tracking_uri=f"sqlite:///{tmp_path}/none.db",
        experiment="tests",
        run_name="run",
        work_dir=str(tmp_path / "run"),
        every_steps=1,
        params={},
        tags={},
        files={},
        started_at=started_at,
        continues=continues,
    )


class Run:
    """A run's state, with the file of its time."""

    def __init__(self, description):
        self.file = GoodputFile(description)
        self.state = RunState(ledger=self.file.ledger)
        self.take = self.state.take


def step(number, at, *, step_s=2.0, waited_s=0.0):
    return StepRecord(number, 1.0, 8.0, 8, 0.1, None, step_s, waited_s, 0.1, recorded_at=at)


def test_a_run_that_goes_on_has_its_earlier_attempts_and_a_failed_resume_leaves_no_trace(tmp_path):
    started = time.time() - 100
    first = Run(described(tmp_path, started))
    for message in (
        step(1, started + 10, step_s=5.0),
        step(2, started + 12, waited_s=0.5),
        EvaluationRecord(2, {}, 3.0, started + 15),
        CheckpointRecord(2, "x", 1, 1, 1.0, 0.25, started + 15.5),
        step(3, started + 18),
    ):
        first.take(message)
    first.file.save()
    failed = Run(described(tmp_path, started + 40, continues={}))
    assert failed.file.ledger.attempts == 2
    resumed = Run(described(tmp_path, started + 50, continues={}))
    for number in (3, 4):
        resumed.take(step(number, started + 60 + 2 * number))
    resumed.take(EventRecord("resumed after step 4", kind="resumed", step=4, recorded_at=started + 70))
    resumed.take(step(5, started + 80))
    found = resumed.state.goodput()
    assert found.attempts == 3, "that of lost workers among them"
    assert found.repeated_steps == 1 and found.seconds["repeated"] == 2.0
    assert found.seconds["evaluation"] == 3.0 and found.seconds["checkpoint"] == 0.25 and found.seconds["input"] == 0.5
    assert found.seconds["restart"] == pytest.approx((66 - 18 - 2) + (80 - 68), abs=1e-5)
    assert sum(found.seconds.values()) == pytest.approx(found.elapsed_s, rel=1e-12)
    assert found.elapsed_s == pytest.approx(time.time() - started, abs=5)


def test_a_wall_clock_that_is_set_forward_by_an_hour_takes_no_time(tmp_path, monkeypatch):
    run = Run(described(tmp_path, None))
    now = time.time
    monkeypatch.setattr("time.time", lambda: now() + 3600)
    step_of_now = StepRecord(1, 1.0, 8.0, 8, 0.1, None, 2.0, 0.0, 0.1)
    run.take(step_of_now)
    found = run.state.goodput()
    assert found.elapsed_s < 1800 and found.seconds["start"] < 1800
    assert EventRecord("a word").recorded_at < now() + 1800
