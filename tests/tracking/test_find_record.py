"""A run is found with what its record lacks."""

from dataclasses import replace

import study_examples

from scaleray.tracking import store
from scaleray.tracking.find_record import find_run, places_of
from scaleray.tracking.operations import LogMetrics


def test_the_course_of_evaluations_comes_from_mlflow_where_the_record_names_a_run(tmp_path, mlflow_database):
    uri = f"sqlite:///{mlflow_database}"
    run = store.RunStore.create(uri, experiment="e", run_name="r", tags={})
    run.send(LogMetrics([("val/loss", 0.5, 1000, 2), ("val/loss", 0.25, 2000, 4)]))
    record = study_examples.run_record(metrics={"val/loss": 0.25}, tracking_uri=uri, run_id=run.run_id)
    for known, course in ((record, {"val/loss": [(2, 0.5), (4, 0.25)]}), (replace(record, run_id=""), {})):
        (tmp_path / "record.json").write_text(known.to_json())
        assert find_run(str(tmp_path)).evaluations == course


def test_a_name_is_looked_for_where_the_environment_says_that_runs_lie(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALERAY_CHECKPOINT__STORAGE_PATH", str(tmp_path))
    assert places_of("mine")[-1].root == str(tmp_path / "mine")
