"""What is gathered of a run while it lives, and the file that a page reads."""

import threading
from dataclasses import replace

import pytest
from live_states import ALERT, beat, describe, step

from scaleray.live import live_run
from scaleray.live.live_run import LiveFile, live_state
from scaleray.live.state.run_state import RunState
from scaleray.profiling.goodput import GoodputLedger
from scaleray.recording.recorder import Recorder
from scaleray.records.alert_record import Alert
from scaleray.records.live_state import LiveState
from scaleray.records.profile_record import Goodput
from scaleray.records.run_record import CheckpointRecord, EvaluationRecord, EventRecord


class Told(GoodputLedger):
    """A ledger whose sum is known."""

    def goodput(self, now):
        return Goodput(10.0, {"productive": 8.0}, attempts=2, repeated_steps=3)


class Run:
    """A run's state with its description, as the recorder has them."""

    def __init__(self, description):
        self.description, self.state = description, RunState(ledger=Told(0.0))
        self.take = self.state.take

    def live(self, beats=(), **more):
        return live_state(self.description, self.state, beats=beats, **more)


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    return Run(describe("sqlite:///none.db", tmp_path, total_steps=40, strategy="ddp", started_at=1000.0))


def test_before_the_first_step_a_run_is_starting_and_says_what_its_ranks_do(run):
    state = run.live([beat(0, step=0)])
    assert (state.status, state.step, state.total_steps, state.left_s) == ("STARTING", 0, 40, None)
    assert state.ranks[0].phase == "forward" and state.loss is None and state.samples_per_s is None


def test_the_time_left_is_what_steps_have_taken_with_everything_between_them(run):
    for number in range(1, 11):
        run.take(step(number, recorded_at=1000.0 + 3 * number))  # steps of 0.5 s, and evaluations of 2.5
    assert run.live().left_s == pytest.approx(30 * 3)


def test_what_a_run_says_of_itself_is_in_its_state(run):
    for message in (
        step(1, loss=2.0),
        step(2, loss=float("nan"), is_finite=False),
        EvaluationRecord(2, {"val/loss": 0.5}, 1.0),
        CheckpointRecord(2, "p", 1, 1, 0.1, 0.0, recorded_at=1001.0),
        EventRecord("a note", kind="info"),
        EventRecord("beware", kind="warning"),
    ):
        run.take(message)
    state = run.live([beat(0), beat(1)], waiting=5)
    assert state.status == "RUNNING" and state.strategy == "ddp" and state.metrics == {"val/loss": 0.5}
    assert (state.nonfinite_steps, state.checkpoint_step, state.checkpoint_at) == (1, 2, 1001.0)
    assert state.events == ["beware"] and (state.attempts, state.repeated_steps, state.goodput) == (2, 3, 0.8)
    assert state.waiting_points == 5 and state.to_dict()["loss"] is None


def test_who_waits_least_is_late_by_what_the_others_wait_more(run):
    ranks = run.live([beat(0, wait_s=0.03), beat(1, wait_s=0.01)]).ranks
    assert [rank.late_s for rank in ranks] == pytest.approx([0.0, 0.02])
    assert [rank.late_s for rank in run.live([beat(0), beat(1)]).ranks] == [None, None]
    assert run.live([beat(0, wait_s=0.03)]).ranks[0].late_s is None


def test_phases_are_the_mean_of_the_ranks(run):
    phases = run.live([beat(0, wait_s=0.04), beat(1)]).phases
    assert phases == pytest.approx({"forward": 0.1, "exposed_communication": 0.02})


def test_steps_that_are_taken_again_are_not_counted_again(run):
    for number in (1, 2, 3, 2, 3, 4):
        run.take(step(number, loss=float(number), is_finite=number != 2))
    state = run.live()
    assert [point[0] for point in state.curve] == [1, 2, 3, 4] and state.nonfinite_steps == 1 and state.step == 4


def test_a_run_that_goes_on_keeps_its_curve_and_what_was_evaluated(run, tmp_path):
    for number in range(1, 9):
        run.take(step(number, loss=float(number)))
    run.take(EvaluationRecord(8, {"val/loss": 0.5}, 1.0))
    LiveFile(tmp_path / "run", run.live).write()
    again = Recorder(describe("sqlite:///none.db", tmp_path, continues={"run_id": "x"}, total_steps=40))
    for number in (7, 8, 9):
        again.state.take(step(number, loss=float(number)))
    state = again.live()
    assert [point[0] for point in state.curve] == list(range(1, 10)) and state.metrics == {"val/loss": 0.5}


def test_a_file_that_is_damaged_costs_a_run_that_goes_on_nothing_else(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "live.json").write_text('{"name": 3')
    run = Recorder(describe("sqlite:///none.db", tmp_path, continues={"run_id": "x"}))
    assert run.live().curve == []


def test_alerts_in_the_folder_are_shown_in_their_newest_state(run, tmp_path):
    lines = [ALERT, replace(ALERT, name="slow_link"), replace(ALERT, state="resolved")]
    text = "".join(map(Alert.to_line, lines)) + '{"name": "cu'
    (tmp_path / "run" / "alerts.jsonl").write_text(text)
    state = run.live()
    assert [(alert.name, alert.state) for alert in state.alerts] == [("straggler", "resolved"), ("slow_link", "firing")]
    assert [alert.name for alert in state.firing] == ["slow_link"]


def test_a_recorder_writes_the_state_and_how_the_run_ended(uri, tmp_path, monkeypatch):
    monkeypatch.setattr(live_run, "WRITE_EVERY_S", 3600.0)
    recorder = Recorder(describe(uri, tmp_path, total_steps=3))
    identity = recorder.start()
    before = LiveState.read(tmp_path / "run" / "live.json")
    assert (before.status, before.name) == ("STARTING", "run")
    recorder.beat(beat(0, world_size=1))
    recorder.log([step(n) for n in range(1, 4)])
    recorder.drain()
    now = recorder.live()
    assert (now.status, now.step, now.run_id, now.mlflow_link) == ("RUNNING", 3, identity.run_id, identity.link)
    recorder.finish("FINISHED", metrics={}, tags={"scaleray.verdict": "done"}, files={})
    after = LiveState.read(tmp_path / "run" / "live.json")
    assert (after.status, after.verdict, after.step, after.has_ended) == ("FINISHED", "done", 3, True)
    assert not (tmp_path / "run" / ".live.json.part").exists()


def test_a_full_disk_does_not_end_the_thread_that_writes(tmp_path, run, monkeypatch):
    monkeypatch.setattr(live_run, "WRITE_EVERY_S", 0.001)
    written = threading.Semaphore(0)

    def state():
        written.release()
        return run.live()

    file = LiveFile(tmp_path / "not-there", state)
    file.start()
    assert all(written.acquire(timeout=30) for _ in range(3))
    file.end()
