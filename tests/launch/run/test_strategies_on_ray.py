"""Strategies under Ray Train: the training of the same workers without Ray, and, where it is promised, of one worker."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from small_runs import job_of, largest_difference, relative_differences, train_job

import scaleray
from scaleray.training.state.final_weight_files import read_weights
from scaleray.workload import load_workload

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("mlflow_database")]

ROOT = Path(__file__).parents[3]
ONE_TRAINING = {
    "fsdp": {"strategy.name": "fsdp", "fsdp.wrap": "size", "fsdp.wrap_min_parameters": 500},
    "uneven shares": {"strategy.name": "ddp", "shares.by": "given", "shares.speeds": [2, 1]},
}
APART = {"local_sgd": {"strategy.name": "local_sgd", "local_sgd.sync_every": 4, "local_sgd.warmup_steps": 2}}


def config_of(tmp_path, **flags):
    required = {
        "stop.after": "30 steps",
        "precision.dtype": "fp64",
        "deterministic": True,
        "tracking.system_metrics": False,
        "tracking.uri": f"sqlite:///{tmp_path / 'mlflow.db'}",
        "checkpoint.storage_path": str(tmp_path / "runs"),
    }
    return scaleray.load_config(ROOT / "jobs" / "digits.yaml", flags={**required, **flags}, environ={})


def train(config, **options):
    record = scaleray.train(config, base_dir=ROOT, **options)
    with open(Path(record.run_dir) / "steps.csv", newline="") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    return record, losses, read_weights(record.run_dir)


def without_ray(place, config):
    job, sources = job_of(config, load_workload("jobs/digits.py:Digits", {}, base_dir=ROOT))
    return train_job(place, job, sources)


@pytest.mark.parametrize("name", [*ONE_TRAINING, *APART])
def test_two_workers_under_ray_train_what_they_train_without_it(ray_session, gloo, tmp_path, name):
    config = config_of(tmp_path, **{"scale.workers": 2}, **{**ONE_TRAINING, **APART}[name])
    record, losses, weights = train(config)
    alike = gloo.run(2, without_ray, config)[0]
    assert record.strategy == config.strategy.name and record.steps == 30
    assert losses == alike.losses
    assert all(torch.equal(weights[key], alike.weights[key]) for key in alike.weights)
    if name in ONE_TRAINING:
        alone, alone_losses, alone_weights = train(config_of(tmp_path), local=True)
        assert max(relative_differences(alone_losses, losses)) < 1e-9
        assert largest_difference(alone_weights, weights) < 1e-9
        assert record.metrics["test/accuracy"] == pytest.approx(alone.metrics["test/accuracy"], abs=1e-9)
