"""The points that the planner learns from, and marks of what is invalid."""

import dataclasses
import json

import pytest
import study_examples
from test_experiments import CONFIG, a_study, a_training

from scaleray.errors import ConfigError, UsageError
from scaleray.planner.ask.team_points_in_mlflow import points_in_mlflow
from scaleray.recording.experiments import read_experiments
from scaleray.recording.study_runs import ParentRun
from scaleray.records.workload_profile import PartProfile, Product, WorkloadProfile
from scaleray.studies.invalidate import invalidate_experiment
from scaleray.studies.repeat_store import INVALID

PART = PartProfile(name="part", num_parameters=1000, products=[Product(rows=1, inner=64, columns=64)], num_operations=3)
COUNTED = WorkloadProfile(
    num_parameters=1000, num_trained_parameters=1000, parameter_bytes=4000, precision="fp32", backward_flops=1e4,
    activation_bytes=100, fixed_activation_bytes=0, count_per_sample=None, parts=[PART],
)  # fmt: skip


def a_counted_study(uri, tmp_path, *, name="counted"):
    """A study with its record in MLflow, whose model's operations are counted."""
    record = study_examples.study(modes=("strong",), sizes=(1, 2, 4), name=name, price=None)
    topology = {"nodes": [{"cpus": 8, "gpus": 0}], "workers": [{"cpu": "EPYC"}]}
    record = dataclasses.replace(
        record, config={**CONFIG, "checkpoint": {"storage_path": str(tmp_path)}}, model_profile=COUNTED.to_dict(),
        conditions=dataclasses.replace(record.conditions, topology=topology),
    )  # fmt: skip
    run = ParentRun.open(uri, "studies", kind="scaling-study", name=name, config=record.config, started_at=1.8e9)
    for at in record.curves[0].points:
        run.log_point(at.point)
    known = run.identify(record)
    (tmp_path / "record.json").write_text(known.to_json())
    assert run.finish(known, files=[tmp_path / "record.json"]) is None
    return run


def test_the_planner_learns_from_the_points_of_studies_that_are_valid(uri, tmp_path):
    a_counted_study(uri, tmp_path)
    a_study(uri, name="uncounted", started_at=1.79e9)
    found = points_in_mlflow(uri)
    assert len(found.models) == 1 and any(
        "uncounted: it has no record.json of a study" in line for line in found.skipped
    )
    assert [(point.workers, point.gpu, point.workers_per_node) for point in found.points] == [
        (1, "cpu", 8),
        (2, "cpu", 8),
        (4, "cpu", 8),
    ]


def test_a_point_that_was_changed_in_mlflow_teaches_nothing(uri, tmp_path):
    from mlflow import MlflowClient

    a_counted_study(uri, tmp_path)
    point = next(one for one in read_experiments(uri, kinds=["point"]) if one.values["gpus"] == 4)
    MlflowClient(uri).log_metric(point.run_id, "point/step_time_s", 1e-6, timestamp=int(2e12))
    found = points_in_mlflow(uri)
    assert [one.workers for one in found.points] == [1, 2]
    assert found.skipped == ("counted, strong-w004-ddp-b512: its params or metrics are not those that were measured",)


def test_what_is_invalid_stays_with_its_reason_and_is_used_by_nothing(uri, tmp_path):
    run = a_counted_study(uri, tmp_path)
    lines = invalidate_experiment("counted", "the fan was off", uri=uri)
    assert "counted is invalid: the fan was off" in lines[0] and str(tmp_path) in lines[1]
    [marked] = (tmp_path / INVALID).glob("*.json")
    assert json.loads(marked.read_text())["study"] == "counted"
    found = read_experiments(uri)
    assert len(found) == 4 and all(one.values["invalid"].startswith("the fan was off (") for one in found)
    learned = points_in_mlflow(uri)
    assert not learned.points and learned.skipped[0].startswith("counted: the fan was off")
    with pytest.raises(UsageError, match="already marked invalid: the fan was off"):
        invalidate_experiment(run.run_id, "twice", uri=uri)


def test_a_single_point_is_invalid_by_its_id(uri, tmp_path):
    a_counted_study(uri, tmp_path)
    point = next(one for one in read_experiments(uri, kinds=["point"]) if one.values["gpus"] == 2)
    invalidate_experiment(point.run_id, "a neighbour ran", uri=uri)
    assert [one.run_id for one in read_experiments(uri) if "invalid" in one.values] == [point.run_id]
    assert [path.name for path in (tmp_path / INVALID).iterdir()] == ["counted-w002.json"]
    assert sorted(p.workers for p in points_in_mlflow(uri).points) == [1, 4]


def test_a_run_that_is_invalid_is_not_what_a_gate_lets_through(uri, tmp_path):
    from recorded_runs import a_run

    from scaleray.recording.same_in_mlflow import differences_from_mlflow
    from scaleray.records.mlflow_operations import LogArtifact

    run = a_training(uri)
    record = a_run(run_id=run.run_id, tracking_uri=uri, metrics={})
    (tmp_path / "record.json").write_text(record.to_json())
    run.send(LogArtifact(str(tmp_path / "record.json")))
    assert differences_from_mlflow(record, uri=record.tracking_uri) == []
    invalidate_experiment(run.run_id, "the fan was off", uri=uri)
    [said] = differences_from_mlflow(record, uri=record.tracking_uri)
    assert said.startswith("it is invalid there: the fan was off")


def test_slips_are_one_error_each(uri, tmp_path):
    a_study(uri)
    a_study(uri, started_at=1.81e9)
    with pytest.raises(UsageError, match="2 runs have this name"):
        invalidate_experiment("study", "why", uri=uri)
    with pytest.raises(UsageError, match="no run of this id or name"):
        invalidate_experiment("nothing", "why", uri=uri)
    with pytest.raises(ConfigError, match="--reason"):
        invalidate_experiment("study", " ", uri=uri)
