"""`scaleray drift` against a promoted model, with the runs of today that MLflow has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient

import scaleray
from scaleray.cli.drift import drift as drift_command
from scaleray.errors import TrackingError, UsageError
from scaleray.launch.drift.drift import drift
from scaleray.launch.promote.promote import promote
from tests.launch.promote.conftest import POLICY

pytestmark = pytest.mark.combination

WIDE = {**POLICY, "drift": {"margin_slower": 50.0, "alpha": 0.4, "min_runs": 2}}
"""A policy that speeds of a loaded machine pass: what is slower fails in tests of the gate."""


@pytest.fixture
def promoted(sides):
    candidates, baselines, uri = sides
    found = promote(candidates, "champion", against=baselines, policy=POLICY, uri=uri)
    assert found.answer == "pass", found.not_passed
    return found, uri


def answers(record):
    return {gate.gate: gate.answer for gate in record.gates}


def trained_again(run, uri, folder, *, seed, **more):
    config = json.loads(Path(run, "run.json").read_text())["config"]
    config["tracking"] |= {"uri": uri, "run_name": None}
    config["checkpoint"]["storage_path"] = str(folder)
    return scaleray.train(scaleray.load_config(flags={**config, "seed": seed, **more}), local=True)


def test_runs_of_the_same_training_since_the_promotion_are_found_and_held_against_it(promoted, sides, tmp_path, capsys):
    _, uri = promoted
    before = drift("corners@champion", uri=uri)
    assert before.answer == "inconclusive" and before.notes and not before.candidates
    again = [trained_again(sides[0][0], uri, tmp_path, seed=seed) for seed in range(2)]
    trained_again(sides[0][0], uri, tmp_path, seed=3, optimizer={"learning_rate": 0.5})
    record = drift("corners@champion", policy=WIDE, uri=uri)
    assert {one.split()[-1] for one in record.candidates} == {one.run_id for one in again}
    assert answers(record) == {"speed": "pass", "convergence": "pass", "data": "pass"}, record.lines()
    assert drift_command("corners@champion", again[0].run_dir, uri=uri, json=True) == 3
    assert json.loads(capsys.readouterr().out)["answer"] == "inconclusive"


def test_a_retraining_that_failed_counts(promoted, sides, tmp_path):
    _, uri = promoted
    again = [trained_again(sides[0][0], uri, tmp_path, seed=seed) for seed in (30, 31, 32)]
    record = Path(again[2].run_dir, "record.json")
    record.write_text(record.read_text().replace('"FINISHED"', '"FAILED"'))
    client = MlflowClient(uri)
    client.set_terminated(again[2].run_id, "FAILED")
    client.log_artifact(again[2].run_id, str(record))
    experiment = client.get_run(again[2].run_id).info.experiment_id
    lost = client.create_run(experiment, run_name="failed early").info.run_id
    client.set_terminated(lost, "FAILED")
    found = drift("corners@champion", policy=WIDE, uri=uri)
    assert len(found.candidates) == 3 and answers(found)["convergence"] == "fail", found.lines()
    assert answers(found)["speed"] == "pass"
    assert found.notes == [f"run {lost} failed and has no record: whether it trained the same is not known"]


def test_a_quietly_worse_run_fails(promoted, sides, tmp_path):
    _, uri = promoted
    strict = {
        **WIDE,
        "convergence": {
            **POLICY["convergence"],
            "metric": "val/loss min",
            "target": "val/loss <= 100",
            "metric_margin": 0.05,
        },
    }
    worse = [
        trained_again(sides[0][0], uri, tmp_path, seed=20 + seed, optimizer={"learning_rate": 1e-6}).run_dir
        for seed in range(2)
    ]
    record = drift("corners@champion", worse, policy=strict, uri=uri)
    assert answers(record)["convergence"] == "fail", record.lines()


def test_bad_input_is_one_error_each(promoted, tmp_path):
    _, uri = promoted
    with pytest.raises(UsageError, match="must be above 0"):
        drift("corners@champion", days=0, uri=uri)
    with pytest.raises(UsageError, match="NAME@ALIAS or NAME/VERSION"):
        drift("corners", uri=uri)
    with pytest.raises(TrackingError, match="no run of this id or name"):
        drift("corners@champion", "nowhere", uri=uri)
    with pytest.raises(TrackingError, match="corners has 1 versions"):
        drift("corners@challenger", uri=uri)
