"""What a folder tells of its run, whatever has become of it."""

import contextlib
import dataclasses
import json
import os
import time

import pytest
import study_examples
from live_states import live_state, step

from scaleray.common.progress import Stage
from scaleray.launch.session.campaign import written_while
from scaleray.live.live_folder import runs_in, state_in_folder
from scaleray.live.steps_file import StepsFile
from scaleray.records.live_state import LOST_S


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "some-run"
    made.mkdir()
    return made


def write(folder, state):
    (folder / "live.json").write_text(state.to_json())


def write_steps(folder, count):
    steps = StepsFile(folder / "steps.csv", is_continued=False, run_path=None)
    for number in range(1, count + 1):
        steps.add(step(number, loss=1 / number))
    steps.write()


def write_record(folder, **more):
    record = dataclasses.replace(study_examples.run_record(), name=folder.name, **more)
    (folder / "record.json").write_text(record.to_json())
    return record


def age(path, seconds):
    os.utime(path, (time.time() - seconds,) * 2)


def test_a_run_that_lives_is_what_its_recorder_wrote(folder):
    state = live_state()
    write(folder, state)
    assert state_in_folder(folder) == state


def test_a_run_that_fell_silent_without_an_end_is_lost(folder):
    write(folder, live_state(seen_at=time.time() - LOST_S - 5))
    state = state_in_folder(folder)
    assert state.status == "LOST" and state.left_s is None and state.step == 120


def test_a_run_that_ended_long_ago_is_not_lost(folder):
    write(folder, live_state(status="FAILED", verdict="it broke", seen_at=time.time() - 1e6))
    assert (state_in_folder(folder).status, state_in_folder(folder).verdict) == ("FAILED", "it broke")


def test_a_run_that_goes_on_is_shown_beside_the_record_of_its_first_end(folder):
    write_record(folder, status="KILLED")
    age(folder / "record.json", 60)
    write(folder, live_state())
    assert state_in_folder(folder).status == "RUNNING"


def test_a_record_that_is_newer_than_the_last_sign_of_life_says_how_the_run_ended(folder):
    write(folder, live_state(seen_at=time.time() - 60))
    write_record(folder, status="FAILED", verdict="it broke")
    assert (state_in_folder(folder).status, state_in_folder(folder).verdict) == ("FAILED", "it broke")


def test_the_last_look_at_a_run_has_what_its_record_lacks(folder):
    """The record is written a moment before the run's last words: whoever watches ends with what is seen then."""
    live = live_state(seen_at=time.time() - 60)
    write(folder, live)
    write_record(folder, status="KILLED", steps=460, samples_per_s=None, step_time_s=None, profile=None)
    state = state_in_folder(folder)
    assert (state.status, state.step, state.left_s) == ("KILLED", 460, None)
    assert state.samples_per_s == live.samples_per_s and state.ranks == live.ranks and state.phases == live.phases
    assert (state.goodput, state.checkpoint_step) == (live.goodput, live.checkpoint_step) and state.goodput


def test_a_run_of_before_there_was_a_live_state_is_shown_from_its_record_and_steps(folder):
    record = write_record(folder)
    write_steps(folder, 12)
    state = state_in_folder(folder)
    assert (state.status, state.step, state.metrics) == (record.status, record.steps, record.metrics)
    assert [point[0] for point in state.curve] == list(range(1, 13))


def test_a_run_without_a_record_is_shown_from_its_steps(folder):
    (folder / "run.json").write_text(json.dumps({"name": "some-run", "run_id": "abc", "started_at": 5.0}))
    assert state_in_folder(folder).status == "STARTING"
    write_steps(folder, 3)
    state = state_in_folder(folder)
    assert (state.status, state.step, state.run_id, state.started_at) == ("RUNNING", 3, "abc", 5.0)
    for path in folder.iterdir():
        age(path, 100)
    age(folder, 100)
    assert state_in_folder(folder).status == "LOST"


def test_a_folder_that_was_just_reserved_is_a_run_that_starts(folder):
    (folder / ".lock").write_text("")
    assert state_in_folder(folder).status == "STARTING"


@pytest.mark.parametrize("names", [(), ("notes.txt",), (".lock", "notes.txt")])
def test_any_other_folder_is_no_run(folder, names):
    for name in names:
        (folder / name).write_text("")
    assert state_in_folder(folder) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": []}', "null"])
def test_files_that_are_damaged_are_as_good_as_none(folder, text):
    (folder / "live.json").write_text(text)
    (folder / "record.json").write_text(text)
    (folder / "run.json").write_text(text)
    assert state_in_folder(folder) is None


@pytest.mark.parametrize(("make", "kind"), [(study_examples.study, "study"), (study_examples.sweep, "sweep")])
def test_a_study_and_a_sweep_are_shown_by_what_they_found(folder, make, kind):
    record = make()
    (folder / "record.json").write_text(record.to_json())
    state = state_in_folder(folder)
    assert (state.kind, state.status, state.name) == (kind, "FINISHED", record.name)
    assert state.notes == record.lines()[1:]


def test_all_runs_are_those_that_live_and_then_those_that_ended_of_late(tmp_path):
    for name, more in (("ended", {"status": "FINISHED"}), ("lives", {}), ("old", {"status": "FINISHED"})):
        (tmp_path / name).mkdir()
        write(tmp_path / name, live_state(name=name, **more))
    (tmp_path / "no-run").mkdir()
    age(tmp_path / "old" / "live.json", 7200)
    age(tmp_path / "old", 7200)
    assert [state.name for state in runs_in(str(tmp_path))] == ["lives", "ended"]
    assert runs_in(str(tmp_path / "not-there")) == []


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt, "KILLED"), (ValueError, "FAILED"), (None, "RUNNING")]
)
def test_a_study_or_sweep_says_how_far_it_is_and_how_it_was_left(folder, error, status):
    turns = Stage("measuring", total=8, unit="turns")
    asked = {"kind": "study", "name": "mine", "run_id": "abc", "started_at": 5.0}
    with contextlib.suppress(error or ()), written_while(lambda: turns, folder, **asked):
        first = state_in_folder(folder)
        turns.advance(3)
        if error is not None:
            raise error
    last = state_in_folder(folder)
    assert (first.kind, first.status, first.done, first.total, first.unit) == ("study", "RUNNING", 0, 8, "turns")
    assert (last.status, last.done, last.run_id, last.started_at) == (status, 3, "abc", 5.0)
    record = study_examples.study()
    (folder / "record.json").write_text(record.to_json())  # which comes after a good end
    assert state_in_folder(folder).status == (status if error else "FINISHED")
