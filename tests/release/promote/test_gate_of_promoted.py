"""`scaleray gate --against NAME@ALIAS`: today's runs, named or found in MLflow, against a promoted model."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from mlflow import MlflowClient

import scaleray
from scaleray.cli.gate import gate
from scaleray.errors import ConfigError, TrackingError, UsageError
from scaleray.models import registry
from scaleray.release.gate.of_promoted import registered
from scaleray.release.promote.promote import promote
from tests.release.promote.conftest import POLICY

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


@pytest.mark.combination
def test_runs_of_the_same_training_since_the_promotion_are_found_and_held_against_it(promoted, sides, tmp_path, capsys):
    _, uri = promoted
    before = scaleray.gate(against="corners@champion", uri=uri)
    assert before.answer == "inconclusive" and before.notes and not before.candidates
    again = [trained_again(sides[0][0], uri, tmp_path, seed=seed) for seed in range(2)]
    trained_again(sides[0][0], uri, tmp_path, seed=3, optimizer={"learning_rate": 0.5})
    record = scaleray.gate(against="corners@champion", policy=WIDE, uri=uri)
    assert {one.split()[-1] for one in record.candidates} == {one.run_id for one in again}
    assert answers(record) == {"speed": "pass", "convergence": "pass", "data": "pass"}, record.lines()
    assert gate(again[0].run_dir, against=["corners@champion"], uri=uri, json=True) == 3
    printed = json.loads(capsys.readouterr().out)
    assert printed["answer"] == "inconclusive" and printed["policy"]["drift"]["min_runs"] == 3
    words = shlex.split(printed["gates"][2]["command"])
    assert words == ["scaleray", "gate", again[0].run_dir, "--against", "models:/corners@champion", "--gates", "data"]
    only = scaleray.gate(*words[2:3], against=words[4:5], gates=words[6:], uri=uri)
    assert answers(only) == {"data": "pass"} == {"data": only.answer}


def test_trials_of_a_sweep_hide_no_retraining(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "PAGE", 2)
    client = MlflowClient(uri := f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.create_experiment("e", str(tmp_path / "artifacts"))
    promoted, again, *trials = (
        client.create_run(experiment, start_time=at).info.run_id for at in range(1000, 8000, 1000)
    )
    for run in (again, *trials):
        client.set_terminated(run)
    for run in trials:
        client.set_tag(run, "mlflow.parentRunId", promoted)
    assert registry.ModelRegistry(uri).runs_beside(promoted, since_ms=1500) == {again: "FINISHED"}


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
    found = scaleray.gate(against="corners@champion", policy=WIDE, uri=uri)
    assert len(found.candidates) == 3 and answers(found)["convergence"] == "fail", found.lines()
    assert answers(found)["speed"] == "pass"
    assert found.notes == [f"run {lost} failed without a record: its training is unknown"]


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
    record = scaleray.gate(*worse, against="corners@champion", policy=strict, uri=uri)
    assert answers(record)["convergence"] == "fail", record.lines()


def test_bad_input_is_one_error_each(promoted, tmp_path):
    _, uri = promoted
    version = "corners@champion"
    with pytest.raises(UsageError, match="must be above 0"):
        scaleray.gate(against=version, days=0, uri=uri)
    with pytest.raises(UsageError, match="--days requires a registered version"):
        scaleray.gate("nowhere", against="corners", days=3, uri=uri)
    with pytest.raises(UsageError, match="NAME@ALIAS or NAME/VERSION"):
        scaleray.gate(against="models:/corners", uri=uri)
    with pytest.raises(UsageError, match="a registered version must be the only baseline"):
        scaleray.gate(against=[version, "models:/corners/1"], uri=uri)
    with pytest.raises(UsageError, match="has no effect with a registered version"):
        scaleray.gate(against=version, study="study", uri=uri)
    with pytest.raises(ConfigError, match="it must be one of speed, convergence, data with a registered version"):
        scaleray.gate(against=version, gates=["scaling"], uri=uri)
    with pytest.raises(TrackingError, match="no run of this id or name"):
        scaleray.gate("nowhere", against=version, uri=uri)
    with pytest.raises(TrackingError, match="corners has 1 versions"):
        scaleray.gate(against="corners@challenger", uri=uri)


def test_a_folder_with_an_at_sign_is_a_run_and_so_is_an_address(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits@home").mkdir()
    assert str(registered(["digits@champion"])) == str(registered(["models:/digits@champion"])) == "digits@champion"
    assert str(registered(["models:/digits/3"])) == "digits/3"
    for name in ("digits@home", "s3://me@host/runs/one", f"{tmp_path}/digits@champion", "digits"):
        assert registered([name]) is None
