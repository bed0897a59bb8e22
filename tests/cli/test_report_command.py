"""`scaleray report` on what commands have written."""

from __future__ import annotations

import dataclasses
import json

import pytest
import study_examples

from scaleray.cli.main import run_command
from scaleray.recording.study_runs import ParentRun


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Neither this user's runs nor their MLflow."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.fixture
def small():
    """A study with few figures."""
    record = study_examples.study(modes=("weak",), sizes=(1, 2), price=None)
    return dataclasses.replace(record, noise=[])


def saved(record, folder):
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(record.to_json())
    return folder


@pytest.mark.combination
def test_a_study_is_found_by_its_folder_its_file_and_its_name(tmp_path, small, capsys):
    folder = saved(small, tmp_path / "home" / "scaleray" / "my-study")
    for run in (str(folder), str(folder / "record.json"), "my-study"):
        assert run_command(["report", run]) == 0
        assert f"report:  {folder / 'report.html'}" in capsys.readouterr().out
        assert small.name in (folder / "report.html").read_text()
        (folder / "report.html").unlink()
    assert (folder / "points.csv").exists() and (folder / "figures" / "speedup-weak.png").exists()


@pytest.mark.combination
def test_json_alone_is_on_stdout_and_out_takes_the_files(tmp_path, capsys):
    record = study_examples.sweep(batches=(32, 64), rules=("sqrt",))
    folder = saved(record, tmp_path / "sweep")
    assert run_command(["report", str(folder), "--out", str(tmp_path / "out"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown.pop("written")["report.html"] == str(tmp_path / "out" / "report.html")
    assert shown == json.loads(record.to_json())
    assert (tmp_path / "out" / "report.html").exists() and not (folder / "report.html").exists()


@pytest.mark.combination
def test_a_study_is_found_in_mlflow_by_its_name_and_id(tmp_path, uri, small, capsys):
    run = ParentRun.open(uri, "studies", kind="scaling-study", name="named", config={})
    saved(small, tmp_path / "study")
    assert run.finish(run.identify(small), files=[tmp_path / "study" / "record.json"]) is None
    for number, name in enumerate(("named", run.run_id)):
        assert run_command(["report", name, "--uri", uri, "--out", str(tmp_path / str(number))]) == 0
        assert run.run_id in capsys.readouterr().err
        assert (tmp_path / str(number) / "report.html").exists()


def test_a_point_of_a_study_in_mlflow_names_the_study_that_holds_it(uri, small, capsys):
    run = ParentRun.open(uri, "studies", kind="scaling-study", name="named", config={})
    run.log_point(small.curves[0].points[0].point)
    known = run.identify(small)
    assert run.finish(known) is None
    point = known.curves[0].points[0].point
    for name in ("weak-w001-ddp-b128", point.run_id):
        assert run_command(["report", name, "--uri", uri]) == 2
        assert "is a scaling-point of named, which holds its record" in capsys.readouterr().err


def test_a_training_is_reported_with_its_steps(tmp_path, capsys):
    folder = saved(study_examples.run_record(), tmp_path / "run")
    (folder / "steps.csv").write_text(study_examples.steps_csv(50))
    assert run_command(["report", str(folder)]) == 0
    assert {path.stem for path in (folder / "figures").iterdir()} >= {"loss", "step-times", "throughput", "memory"}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "there is no folder with a record.json"),
        ("{", "is not that of a run, study or sweep"),
        ('{"outcomes": []}', "is not that of a run, study or sweep"),
        ('{"curves": [{"mode": "sideways"}]}', "is not that of a run, study or sweep"),
    ],
)
def test_what_cannot_be_reported_gives_one_message_and_code_2(tmp_path, capsys, content, says):
    folder = tmp_path / "x"
    folder.mkdir()
    if content is not None:
        (folder / "record.json").write_text(content)
    assert run_command(["report", str(folder)]) == 2
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error
    assert (
        not list((tmp_path / "home").rglob("*")) if (tmp_path / "home").exists() else True
    )  # looking made no database


def test_a_folder_that_cannot_be_written_is_named(tmp_path, small, capsys):
    folder = saved(small, tmp_path / "study")
    (tmp_path / "file").write_text("")
    assert run_command(["report", str(folder), "--out", str(tmp_path / "file")]) == 2
    assert "The report cannot be written to" in capsys.readouterr().err


def test_an_interrupted_run_in_mlflow_has_no_record_yet(uri, capsys):
    run = ParentRun.open(uri, "studies", kind="scaling-study", name="going-on", config={})
    assert run_command(["report", run.run_id, "--uri", uri]) == 2
    assert "has no record.json" in capsys.readouterr().err
    run.finish(None, status="KILLED")


def test_a_record_that_mlflow_missed_is_sent_by_replay(tmp_path, uri, small, capsys):
    run = ParentRun.open(uri, "studies", kind="scaling-study", name="away", config={})
    folder = saved(run.identify(small), tmp_path / "study")
    assert run_command(["tracking", "replay", str(folder / "record.json"), "--uri", uri]) == 0
    assert "MLflow now has everything" in capsys.readouterr().out
    from mlflow import MlflowClient

    children = MlflowClient(uri).search_runs([run.experiment_id], f"tags.`mlflow.parentRunId` = '{run.run_id}'")
    assert len(children) == 2
    assert (folder / "record.json").exists()
