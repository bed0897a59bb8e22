"""The registry of experiments in a real SQLite store: what is listed, found, and seen to be changed."""

import subprocess
import sys

import pytest
import study_examples
from receiver import receiving
from test_docs import blocks

from scaleray.errors import ConfigError, TrackingError
from scaleray.recording import store
from scaleray.recording.experiments import moment_ms, read_experiments
from scaleray.recording.store import RunStore
from scaleray.recording.study_runs import ParentRun
from scaleray.records.experiment import INVALID, OWNER, PROFILED, PURPOSE, REQUIRED

CONFIG = {
    "workload": {"name": "jobs/digits.py:Digits"}, "batch": {"global_size": 512}, "optimizer": {"rule": "linear"},
    "strategy": {"name": "ddp"},
}  # fmt: skip


def a_study(uri, *, name="study", sizes=(1, 2, 4, 8), tags=None, started_at=1.8e9):
    record = study_examples.study(modes=("strong",), sizes=sizes, name=name)
    of_team = {OWNER: "anna", PURPOSE: "a curve", "scaleray.workload": "jobs/digits.py:Digits", **(tags or {})}
    run = ParentRun.open(
        uri, "studies", kind="scaling-study", name=name, config=CONFIG, tags=of_team, started_at=started_at
    )
    for curve in record.curves:
        for at in curve.points:
            run.log_point(at.point)
    assert run.finish(run.identify(record)) is None
    return run


def a_training(uri, *, name="run", tags=None, metrics=None, params=None):
    from scaleray.records.mlflow_operations import EndRun, LogDataset, LogMetrics, LogParams

    own = {
        "scaleray.kind": "train",
        "scaleray.workload": "cnn.Net",
        "mlflow.source.git.commit": "c0ffee",
        **(tags or {}),
    }
    run = RunStore.create(uri, experiment="runs", run_name=name, tags=own, started_at=1.81e9)
    run.send(LogParams({"batch.global_size": 64, "optimizer.rule": "sqrt", "topology.workers": "4", **(params or {})}))
    run.send(LogMetrics([(key, value, 1, 0) for key, value in (metrics or {}).items()]))
    run.send(LogDataset(name="train", digest="aabb", context="training", source={}, profile={}))
    run.send(EndRun("FINISHED", int(1.82e12)))
    return run


def missing(experiment):
    """Required fields that are not known."""
    known = {**experiment.values, "cost": experiment.values.get("worker_hours")}
    return [name for name in REQUIRED if known.get(name) is None]


def names(found):
    return [one.values["name"] for one in found]


@pytest.fixture
def stored(uri):
    """A study of four points and a training."""
    a_study(uri)
    a_training(
        uri, metrics={"point/samples_per_s": 900.0, "val/accuracy": 0.97, "cost/worker_hours": 2.5}, tags={OWNER: "ben"}
    )
    return uri


@pytest.mark.combination
def test_runs_studies_and_points_are_listed_newest_first_with_what_the_team_must_know(stored):
    found = read_experiments(stored)
    assert names(found)[0] == "run" and len(found) == 6
    run = found[0].values
    assert (run["owner"], run["model"], run["gpus"], run["global_batch"], run["rule"]) == (
        "ben",
        "cnn.Net",
        4,
        64,
        "sqrt",
    )
    assert (run["data_hash"], run["code"], run["worker_hours"]) == ("aabb", "c0ffee", 2.5)
    assert missing(found[0]) == ["purpose", "hardware", "topology", "environment"]
    point = next(one for one in found if one.values["name"] == "strong-w008-ddp-b512")
    assert (point.kind, point.values["gpus"], point.values["model"], point.values["owner"]) == (
        "point",
        8,
        "digits.Digits",
        "anna",
    )
    study = next(one for one in found if one.kind == "study")
    assert study.values["gpus"] == 8 and study.values["efficiency"] == pytest.approx(point.values["efficiency"])
    assert all(one.is_usable for one in found)


def test_model_workers_date_and_kind_choose(stored):
    assert names(read_experiments(stored, model="digits", gpus=4)) == ["strong-w004-ddp-b512"]
    assert names(read_experiments(stored, since="2027-05-01")) == ["run"]
    assert names(read_experiments(stored, gpus=8, kinds=["study"])) == ["study"]


@pytest.mark.combination
def test_the_documented_search_of_mlflow_finds_points(uri, tmp_path, monkeypatch):
    import pyarrow.parquet

    a_study(uri)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    [script] = blocks("docs/experiments.md", "search.py")
    # in a process of its own: MLflow in this one may have been given another address
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
    found = pyarrow.parquet.read_table("points.parquet").to_pylist()
    assert [(row["params.point.workers"], row["owner"]) for row in found] == [("8", "anna")]


def test_points_of_a_study_that_began_before_the_date_still_have_its_owner(uri):
    study = a_study(uri, started_at=1.7e9)
    assert study.run_id not in {one.run_id for one in read_experiments(uri, since="2026-01-01")}
    assert {one.values["owner"] for one in read_experiments(uri, since="2026-01-01")} == {"anna"}


def test_a_profile_is_one_by_its_tag(uri):
    a_training(uri, tags={PROFILED: "true"})
    assert [one.kind for one in read_experiments(uri)] == ["profile"]


@pytest.mark.parametrize(
    ("asked", "message"), [({"since": "yesterday"}, "it must be a date such as"), ({"gpus": 0}, "at least 1")]
)
def test_a_question_that_cannot_be_answered_is_one_error(stored, asked, message):
    import re

    with pytest.raises(ConfigError) as caught:
        read_experiments(stored, **asked)
    assert re.search(message, str(caught.value), re.DOTALL), str(caught.value)


def test_an_empty_store_and_one_that_is_away_are_said_and_no_database_is_made(uri, tmp_path):
    with pytest.raises(TrackingError, match="has no runs of scaleray"):
        read_experiments(uri)
    with pytest.raises(TrackingError, match="has no runs of scaleray"):
        read_experiments(uri, since="1d")
    none = tmp_path / "none.db"
    with pytest.raises(TrackingError, match="choose another database with --uri"):
        read_experiments(f"sqlite:///{none}")
    assert not none.exists()
    with pytest.raises(TrackingError, match="does not answer"):
        read_experiments("http://127.0.0.1:9")


def test_a_server_that_redirects_is_named_with_the_place(monkeypatch):
    """As one behind a company's login: MLflow's client follows, and reports the other server."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(store, "PAUSE_S", 0)
    with receiving([302]) as receiver:
        with pytest.raises(TrackingError) as refused:
            read_experiments(receiver.url("/").rstrip("/"))
        assert f"redirects to {receiver.url('/elsewhere')}." in str(refused.value)


def test_ages_and_dates_are_moments():
    assert moment_ms("2026-11-01") == 1793491200000 == moment_ms("2026-11-01T01:00:00+01:00")
    assert moment_ms("1d") - moment_ms("2d") == pytest.approx(86_400_000, abs=1000)


@pytest.mark.parametrize(
    ("metric", "said"), [("point/step_time_s", "not those that were measured"), ("point/efficiency", "its efficiency")]
)
def test_a_point_whose_number_was_changed_in_mlflow_is_seen(stored, metric, said):
    from mlflow import MlflowClient

    point = next(one for one in read_experiments(stored, kinds=["point"]) if one.values["gpus"] == 4)
    MlflowClient(stored).log_metric(point.run_id, metric, 0.001, step=0, timestamp=int(2e12))
    changed = [one for one in read_experiments(stored) if one.problem]
    assert [one.run_id for one in changed] == [point.run_id] and said in changed[0].problem
    assert not changed[0].is_usable


def test_what_is_marked_invalid_stays_with_its_reason_and_so_do_the_points_of_a_study(uri):
    run = a_study(uri, tags={INVALID: "the fan was off"})
    found = read_experiments(uri)
    assert len(found) == 5 and {one.values["invalid"] for one in found} == {"the fan was off"}
    assert run.run_id in {one.run_id for one in found} and not any(one.is_usable for one in found)


def test_a_measured_point_is_not_written_again_with_other_numbers(uri):
    record = study_examples.study(modes=("strong",), sizes=(1, 2))
    run = a_study(uri, sizes=(1, 2))
    again = ParentRun.open(uri, "", kind="scaling-study", name="study", config={}, continue_run_id=run.run_id)
    again.log_point(record.curves[0].points[0].point)  # the same numbers
    assert again.finish(None) is None
    other = study_examples.point("strong", 2, step_1=0.5)
    changed = ParentRun.open(uri, "", kind="scaling-study", name="study", config={}, continue_run_id=run.run_id)
    changed.log_point(other)
    assert "ChangedPoint: strong-w002-ddp-b512 was measured with other numbers" in changed.finish(None)
    found = [one for one in read_experiments(uri, kinds=["point"]) if one.values["gpus"] == 2]
    assert [one.values["step_time_s"] for one in found] == [
        pytest.approx(record.curves[0].points[1].point.step_time_s.value)
    ]
