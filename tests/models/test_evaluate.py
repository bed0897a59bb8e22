"""Metrics of a run's model, measured again."""

from __future__ import annotations

import dataclasses
import itertools
import json

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
import torch
from small_runs import NUM_FEATURES, Classify, rows

import scaleray
from scaleray.cli.main import run_command
from scaleray.data import iterable
from scaleray.errors import DataError, UsageError
from scaleray.models import evaluate as room
from scaleray.models import predict
from scaleray.models.load import find_parts
from scaleray.models.packed import pack
from scaleray.models.trained_run import find_trained
from scaleray.records.json_record import leaves


@pytest.fixture(scope="module")
def again(trained):
    """The evaluation of the run's splits, recorded."""
    return scaleray.evaluate(trained.run_dir, local=True)


def test_the_figures_are_those_that_the_training_measured(trained, again):
    assert again.metrics == pytest.approx(trained.metrics, rel=1e-6)
    assert (again.rows, again.step) == ({"val": 26}, trained.steps)


def test_a_checkpoint_has_the_figures_of_its_own_evaluation(trained):
    from mlflow import MlflowClient

    client = MlflowClient(trained.tracking_uri)
    measured = {m.step: m.value for m in client.get_metric_history(trained.run_id, "val/loss")}
    for step in (8, 16):
        found = scaleray.evaluate(trained.run_dir, step=step, local=True, record=False)
        assert found.metrics["val/loss"] == pytest.approx(measured[step], rel=1e-6) and found.step == step


def test_the_figures_are_in_mlflow_beside_the_trainings_own(trained, again):
    from mlflow import MlflowClient

    client = MlflowClient(trained.tracking_uri)
    run = client.get_run(trained.run_id)
    assert run.info.status == "FINISHED"
    assert {name: run.data.metrics[f"evaluate/{name}"] for name in again.metrics} == pytest.approx(again.metrics)
    assert len(client.get_metric_history(trained.run_id, "val/loss")) == 3
    assert [file.path.endswith(".json") for file in client.list_artifacts(trained.run_id, "evaluate")] == [True]


def evaluate_as_rank(place, run):
    parts, found = find_parts(run), find_trained(run)
    config = room.evaluation_config(parts, found, place.world_size)
    sources = room._sources(parts, None, None)
    job = room.evaluation_job(config, parts.workload, sources)
    return room.evaluate_here(place, room.Task(job, parts.weights), sources)


def test_two_workers_measure_what_one_does(gloo, trained):
    for metrics in gloo.run(2, evaluate_as_rank, trained.run_dir):
        assert metrics == pytest.approx(trained.metrics, rel=1e-6)


def test_other_data_is_named_by_its_file(trained, tmp_path, classes, capsys):
    val = classes.Points().datasets()["val"]
    columns = {**{f"x_{n}": val["x"][:, n] for n in range(4)}, "y": val["y"], "note": np.array(["?"] * 26)}
    pyarrow.csv.write_csv(pa.table(columns), tmp_path / "holdout.csv")
    words = ["evaluate", trained.run_dir, "--data", str(tmp_path / "holdout.csv"), "--local", "--no-record"]
    assert run_command([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["metrics"]["holdout/loss"] == pytest.approx(trained.metrics["val/loss"], rel=1e-4)
    assert told["recorded"] == {} and told["rows"] == {"holdout": 26}
    assert run_command(words) == 0
    assert "holdout   accuracy" in capsys.readouterr().out


def test_other_data_goes_through_the_workloads_transform(trained, tmp_path, classes):
    val = classes.Scaled().datasets()["val"]
    columns = {**{f"tenths_{n}": val["tenths"][:, n] for n in range(4)}, "y": val["y"]}
    pyarrow.csv.write_csv(pa.table(columns), tmp_path / "holdout.csv")
    for data in (tmp_path / "holdout.csv", val):
        found = scaleray.evaluate(trained.run_dir, data=data, workload=classes.Scaled, local=True, record=False)
        assert [*found.metrics.values()] == pytest.approx([*trained.metrics.values()], rel=1e-4)


def test_the_training_split_is_evaluated_when_it_is_named(trained):
    found = scaleray.evaluate(trained.run_dir, split="train", local=True, record=False)
    assert found.rows == {"train": 64} and found.metrics["train/accuracy"] > 0.4


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"split": "test"}, "the run has the splits train, val"),
        ({"split": "val", "data": "a.csv"}, "omit one of them"),
        ({"workers": 0}, "at least 1"),
    ],
)
def test_bad_input_is_one_message(trained, options, says):
    with pytest.raises(UsageError, match=says):
        scaleray.evaluate(trained.run_dir, local=True, **options)


def test_data_without_a_column_of_the_training_names_it(trained, tmp_path):
    pyarrow.csv.write_csv(pa.table({"x_0": [1.0], "y": [1]}), tmp_path / "a.csv")
    with pytest.raises(
        DataError, match=r"column x of .*a\.csv is missing: the training had it; the columns are x_0, y"
    ):
        scaleray.evaluate(trained.run_dir, data=tmp_path / "a.csv", local=True)


@pytest.mark.parametrize("has_checkpoints", [False, True])
def test_attributes_that_a_callback_changes_belong_to_the_weights(trained, tmp_path, has_checkpoints):
    config = {
        **{
            key: value
            for key, value in leaves(trained.config)
            if value is not None and not key.startswith("checkpoint")
        },
        "workload.name": trained.config["workload"]["name"].replace(":Points", ":Annealed"),
        "tracking.run_name": f"annealed_{has_checkpoints}",
        "checkpoint.storage_path": str(tmp_path),
        **({"checkpoint.every": "8 steps", "checkpoint.keep_last": 3} if has_checkpoints else {}),
    }
    found = scaleray.train(config, local=True)
    assert found.attributes == {"1/negative_slope": pytest.approx(2.4)}
    assert any("attributes changed during training: 1.negative_slope = 2.4" in event for event in found.events)
    assert scaleray.evaluate(found.run_dir, local=True, record=False).metrics == pytest.approx(found.metrics, rel=1e-6)
    assert scaleray.load(found.run_dir).module[1].negative_slope == pytest.approx(2.4)
    pack(find_trained(found.run_dir), find_parts(found.run_dir), tmp_path / "packed")
    assert scaleray.load(tmp_path / "packed").module[1].negative_slope == pytest.approx(2.4)
    if has_checkpoints:
        assert scaleray.load(found.run_dir, step=8).module[1].negative_slope == pytest.approx(0.8)


class OnAStream(Classify):
    """Trains on rows without an end."""

    def datasets(self):
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                return ({"x": np.zeros(NUM_FEATURES, np.float32), "y": number % 2} for number in itertools.count())

        return {"train": Stream(), "val": rows(8)}


def test_a_training_on_rows_without_an_end_is_evaluated_on_its_other_splits(trained, monkeypatch):
    monkeypatch.setattr(iterable, "SHORT_COUNT_S", 0.02)
    monkeypatch.setattr(iterable, "COUNT_S", 0.02)
    parts = dataclasses.replace(find_parts(trained.run_dir), workload=OnAStream())
    sources = room._sources(parts, None, None)
    assert {name: source.num_rows for name, source in sources.items()} == {"val": 8}
    with pytest.raises(DataError, match="the train data is endless"):
        room._sources(parts, None, "train")
    with pytest.raises(DataError, match="the train data is endless"):
        predict._split_of(OnAStream(), "train", None)
    assert predict._split_of(OnAStream(), "val", None).num_rows == 8
