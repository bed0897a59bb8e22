"""A run is found with what its record lacks."""

import math
from dataclasses import replace

import study_examples

from scaleray.recording import store
from scaleray.recording.find_record import find_run, locations_of
from scaleray.records.mlflow_operations import LogMetrics


def test_evaluations_are_those_of_the_record_and_one_more_point_in_mlflow_turns_nothing(tmp_path, mlflow_database):
    uri = f"sqlite:///{mlflow_database}"
    run = store.RunStore.create(uri, experiment="e", run_name="r", tags={})
    run.send(LogMetrics([("val/loss", 0.5, 1000, 2), ("val/loss", 0.01, 1500, 3), ("val/loss", 0.25, 2000, 4)]))
    more = {"metrics": {"val/loss": None}, "evaluations": {"val/loss": [[2, 0.5], [4, None]]}}
    record = study_examples.run_record(tracking_uri=uri, run_id=run.run_id, **more)
    (tmp_path / "record.json").write_text(record.to_json())
    (first, second) = find_run(str(tmp_path), uri=uri).evaluations["val/loss"]
    assert first == (2, 0.5) and second[0] == 4 and math.isnan(second[1])


def test_a_database_that_a_record_names_is_not_opened(tmp_path, monkeypatch):
    """It would get MLflow's tables; a server would get the reader's credentials."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/none.db")
    (tmp_path / "innocent.db").touch()
    record = study_examples.run_record(
        metrics={"val/loss": 0.25}, tracking_uri=f"sqlite:///{tmp_path}/innocent.db", run_id="a" * 32
    )
    (tmp_path / "record.json").write_text(record.to_json())
    assert find_run(str(tmp_path)).evaluations == {}
    assert (tmp_path / "innocent.db").stat().st_size == 0 and not (tmp_path / "none.db").exists()


def test_a_record_from_elsewhere_holds_nothing_that_a_terminal_obeys(tmp_path):
    record = study_examples.run_record(
        name="a\x1b[2J\npass  b", verdict="line\nline\x9b31m \\u001b", events=["\b\r\x07\x7f"]
    )
    text = record.to_json()
    for written in (text, text.replace("\\u009b", "\x9b")):
        (tmp_path / "record.json").write_text(written)
        found = find_run(str(tmp_path)).record
        assert (found.name, found.verdict, found.events) == ("a [2J pass  b", "line\nline 31m \\u001b", ["    "])


def test_the_course_of_evaluations_of_an_older_record_comes_from_the_mlflow_in_use(tmp_path, mlflow_database):
    uri = f"sqlite:///{mlflow_database}"
    run = store.RunStore.create(uri, experiment="e", run_name="r", tags={})
    run.send(LogMetrics([("val/loss", 0.5, 1000, 2), ("val/loss", 0.25, 2000, 4)]))
    record = study_examples.run_record(metrics={"val/loss": 0.25}, tracking_uri=uri, run_id=run.run_id)
    for known, course in ((record, {"val/loss": [(2, 0.5), (4, 0.25)]}), (replace(record, run_id=""), {})):
        (tmp_path / "record.json").write_text(known.to_json())
        assert find_run(str(tmp_path), uri=uri).evaluations == course


def test_a_name_is_looked_for_where_the_environment_says_that_runs_lie(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALERAY_CHECKPOINT__STORAGE_PATH", str(tmp_path))
    assert locations_of("mine")[-1].root == str(tmp_path / "mine")
