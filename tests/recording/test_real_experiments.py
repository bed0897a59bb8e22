"""Real trainings and studies as the registry knows them: nothing that a team must know is missing, and nothing is measured twice."""

import pytest
from small_runs import Classify
from test_experiments import missing

import scaleray
from scaleray.errors import ConfigError
from scaleray.planner.ask.team_points_in_mlflow import points_in_mlflow
from scaleray.recording.experiments import read_experiments
from scaleray.records.experiment import REQUIRED


@pytest.fixture
def flags(tmp_path, uri):
    """A training of some steps with an owner and a policy."""
    (tmp_path / "team.yaml").write_text("invariants:\n  purpose: required\nconstraints:\n  global_batch: {max: 4}\n")
    return {
        "workload.name": "x:Classify", "batch.global_size": 8, "optimizer.learning_rate": 0.1, "stop.after": "4 steps",
        "tracking.uri": uri, "checkpoint.storage_path": str(tmp_path / "runs"), "tracking.owner": "anna",
        "tracking.policy": str(tmp_path / "team.yaml"), "study.price_per_worker_hour": 2.0, "scale.gpus_per_worker": 0,
    }  # fmt: skip


def test_a_training_that_breaks_the_policy_leaves_nothing_and_one_that_keeps_it_is_known_in_full(flags, tmp_path, uri):
    with pytest.raises(ConfigError, match=r"team\.yaml:2 purpose is required"):
        scaleray.train(flags, Classify(), local=True)
    assert not (tmp_path / "runs").exists()
    flags["tracking.purpose"] = "a baseline"
    with pytest.raises(ConfigError, match=r"team\.yaml:4 global_batch is 8: a constraint of"):
        scaleray.train(flags, Classify(), local=True)
    scaleray.train({**flags, "tracking.policy_reason": "four are too noisy"}, Classify(), local=True)
    [run] = [one for one in read_experiments(uri) if "exceptions" in one.values]
    assert missing(run) == [] and run.values["exceptions"].endswith(": four are too noisy")
    assert {name: run.values[name] for name in ("owner", "purpose", "global_batch", "rule", "topology")} == {
        "owner": "anna", "purpose": "a baseline", "global_batch": 8, "rule": "none", "topology": "1 node, 1 worker",
    }  # fmt: skip
    assert (
        run.values["cost"] == pytest.approx(2.0 * run.values["worker_hours"])
        and set(REQUIRED) - {"cost"} <= run.values.keys()
    )


@pytest.mark.slow
def test_studies_are_reused_invalidated_and_learned_from(flags, tmp_path, uri):
    flags = {**flags, "tracking.purpose": "curves", "tracking.policy_reason": "a study of sizes"}
    sizes = {"world_sizes": [1, 2], "repeats": 2, "steps": 8, "seconds": 0.2, "local": True}
    first = scaleray.study({**flags, "tracking.run_name": "first"}, Classify(), **sizes)
    second = scaleray.study({**flags, "tracking.run_name": "second", "batch.global_size": 16}, Classify(), **sizes)
    assert first.model_profile is not None
    said = []
    again = scaleray.study({**flags, "tracking.run_name": "again"}, Classify(), **sizes, say=said.append)
    assert any("measurements reused from first" in line for line in said)
    assert {at.point.reused_from for at in again.curves[0].points} == {"first"}
    steady = {
        (record.name, at.point.workers)
        for record in (first, second)
        for at in record.curves[0].points
        if not at.point.marks
    }
    assert {(point.study, point.workers) for point in points_in_mlflow(uri).points} == steady
    scaleray.invalidate_experiment("first", "the fan was off", uri=uri)
    said.clear()
    scaleray.study({**flags, "tracking.run_name": "anew"}, Classify(), **sizes, say=said.append)
    assert not any("reused from first" in line for line in said)
    assert all(missing(one) == [] for one in read_experiments(uri, kinds=["study"]))
