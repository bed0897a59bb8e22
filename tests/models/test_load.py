"""The model of a run, loaded again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import scaleray
from scaleray.checkpoints.catalog import Catalog
from scaleray.errors import CheckpointError, DataError, TrackingError, UsageError, WorkloadError
from scaleray.models.load import find_parts
from scaleray.training.state.final_weight_files import read_weights


def final_weights(run):
    return read_weights(run)


def assert_same(module, weights):
    own = module.state_dict()
    assert own.keys() == weights.keys() and all(torch.equal(own[name], weights[name]) for name in own)


def copy_of(run, folder):
    """A copy of a run's folder that may be spoilt, and its run.json as a mapping."""
    copy = Path(shutil.copytree(run, folder / "copy"))
    return copy, json.loads((copy / "run.json").read_text())


def test_the_final_weights_are_loaded_in_evaluation_mode(trained):
    model = scaleray.load(trained.run_dir)
    assert_same(model.module, final_weights(trained.run_dir))
    assert not any(part.training for part in model.module.modules())
    assert (model.step, model.words) == (trained.steps, "the final weights of points")


def test_a_run_is_found_by_its_name_and_by_its_id_in_mlflow(trained, monkeypatch):
    for name in (trained.name, trained.run_id):
        model = scaleray.load(name, uri=trained.tracking_uri)
        assert_same(model.module, final_weights(trained.run_dir))


def test_loading_draws_no_random_numbers(run):
    before = torch.get_rng_state()
    scaleray.load(run)
    assert torch.equal(before, torch.get_rng_state())


def test_the_record_names_the_best_evaluation_and_the_checkpoint_that_has_its_weights(trained):
    best, catalog = trained.best, Catalog.of_run(trained.run_dir)
    assert best["metric"] == "val/loss" and best["step"] == scaleray.load(trained.run_dir, step="best").step
    assert catalog.read(best["step"]).own_metrics["val/loss"] == best["value"]
    there, only = Catalog.at(best["checkpoint"])
    assert only == best["step"] and there.steps() == catalog.steps()


def test_a_checkpoint_is_loaded_by_its_step_and_as_the_best(run, trained):
    first, last = scaleray.load(run, step=8), scaleray.load(run, step=24)
    assert_same(last.module, final_weights(run))
    assert not torch.equal(first.module[0].weight, last.module[0].weight)
    from mlflow import MlflowClient

    history = MlflowClient(trained.tracking_uri).get_metric_history(trained.run_id, "val/loss")
    lowest = min(history, key=lambda metric: metric.value).step
    assert scaleray.load(run, step="best").step == scaleray.load(run, step="val/loss min").step == lowest
    assert scaleray.load(run, step="val/loss max").step == max(history, key=lambda metric: metric.value).step


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (7, "complete checkpoints: 24, 16, 8"),
        ("val/nothing min", "measured: val/accuracy, val/loss"),
        ("first", "best, or a metric"),
    ],
)
def test_a_step_that_is_not_there_names_those_that_are(run, step, says):
    with pytest.raises(UsageError, match=says):
        scaleray.load(run, step=step)


def test_a_run_without_final_weights_gives_its_newest_checkpoint_and_says_so(run, tmp_path):
    copy, _ = copy_of(run, tmp_path)
    (copy / "weights.pt").unlink()
    record = json.loads((copy / "record.json").read_text())
    (copy / "record.json").write_text(json.dumps({**record, "weights": {}}))
    model = scaleray.load(copy)
    assert_same(model.module, final_weights(run))
    assert (model.step, model.words) == (24, "the weights after step 24 of points")


def test_a_run_whose_folder_is_gone_is_loaded_from_mlflow(trained, tmp_path):
    away = Path(shutil.move(trained.run_dir, tmp_path / "away"))
    try:
        model = scaleray.load(trained.run_id, uri=trained.tracking_uri)
        assert_same(model.module, final_weights(away))
    finally:
        shutil.move(away, trained.run_dir)


def test_weights_that_all_ranks_wrote_are_loaded(run, tmp_path):
    from scaleray.strategies.contract.weight_shares import Placed, WeightShare
    from scaleray.training.state import final_weight_files as weights

    copy, _ = copy_of(run, tmp_path)
    (copy / "weights.pt").unlink()
    final = final_weights(run)
    layout = {name: Placed(number % 2, tensor.nbytes) for number, (name, tensor) in enumerate(final.items())}
    for rank in (0, 1):
        own = {name: final[name] for name, placed in layout.items() if placed.rank == rank}
        weights.save_weights(WeightShare(own, layout), str(copy), rank=rank)
    written = {name: vars(stored) for name, stored in weights.complete(str(copy)).items()}
    record = json.loads((copy / "record.json").read_text())
    (copy / "record.json").write_text(json.dumps({**record, "weights": written}))
    model = scaleray.load(copy)
    assert_same(model.module, final)
    assert model.words == "the final weights of points"


def test_a_workload_that_is_gone_is_one_message_with_the_way_out(run, tmp_path, classes):
    copy, about = copy_of(run, tmp_path)
    about["config"]["workload"]["name"] = "gone.py:Points"
    (copy / "run.json").write_text(json.dumps(about))
    with pytest.raises(WorkloadError, match=r"(?s)the workload gone.py:Points of points cannot be found.*--workload"):
        scaleray.load(copy)
    assert_same(scaleray.load(copy, workload=classes.Points).module, final_weights(run))
    assert_same(scaleray.load(copy, workload=classes.Points()).module, final_weights(run))
    assert_same(scaleray.load(copy, workload=f"{classes.__file__}:Points").module, final_weights(run))


def test_weights_of_another_model_name_the_first_tensor_that_differs(run, classes):
    with pytest.raises(CheckpointError, match=r"the model's 0.bias .*the final weights of points has"):
        scaleray.load(run, workload=classes.Points(width=9))


def test_a_run_that_is_not_there_is_one_message(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(TrackingError, match=r"there is no folder with a record\.json"):
        scaleray.load("nothing-of-this-name")


@pytest.fixture(scope="module")
def preprocessed(tmp_path_factory, trained, empty_database):
    """The record of a run with a preprocessor, which makes numbers of words."""
    folder = tmp_path_factory.mktemp("preprocessed")
    database = shutil.copy(empty_database, folder / "mlflow.db")
    name = trained.config["workload"]["name"].replace(":Points", ":Words")
    config = {
        "workload.name": name,
        "batch.global_size": 8,
        "optimizer.learning_rate": 0.05,
        "stop.after": "2 epochs",
        "checkpoint.storage_path": str(folder),
        "tracking.uri": f"sqlite:///{database}",
        "tracking.system_metrics": False,
    }
    return scaleray.train(config, local=True)


@pytest.mark.combination
def test_a_preprocessor_comes_with_the_model_and_changes_what_is_predicted_and_evaluated(
    preprocessed, tmp_path, classes
):
    model = scaleray.load(preprocessed.run_dir)
    assert model.preprocessor.words == ["a", "b", "c"]
    val = model.workload.datasets()["val"]
    with torch.no_grad():
        expected = model.module(torch.from_numpy(val["tenths"]) / model.preprocessor.largest).numpy()
    header = [*(f"tenths_{n}" for n in range(4)), "corner"]
    lines = [",".join(map(str, (*row, word))) for row, word in zip(val["tenths"], val["corner"], strict=True)]
    (tmp_path / "val.csv").write_text("\n".join([",".join(header), *lines]))
    (tmp_path / "new.csv").write_text("\n".join(line.rpartition(",")[0] for line in [",".join(header), *lines]))
    for data in ("val.csv", "new.csv"):
        found = scaleray.predict(preprocessed.run_dir, tmp_path / data, local=True)
        np.testing.assert_allclose(found.columns["output"], expected, rtol=1e-3, atol=1e-5)
    for more in ({}, {"data": tmp_path / "val.csv"}, {"data": val}):
        again = scaleray.evaluate(preprocessed.run_dir, local=True, record=False, **more)
        assert [*again.metrics.values()] == pytest.approx([*preprocessed.metrics.values()], rel=1e-4)


def test_a_missing_column_that_the_model_needs_is_no_label(preprocessed, tmp_path):
    (tmp_path / "a.csv").write_text("corner,nr\na,1\nb,2\n")
    with pytest.raises(DataError, match=r"column tenths of .*is missing: x of the batch is computed from it"):
        scaleray.predict(preprocessed.run_dir, tmp_path / "a.csv", local=True)
    (tmp_path / "b.csv").write_text("name\na\nb\n")
    with pytest.raises(DataError, match=r"b.csv has the columns name: training had tenths, corner"):
        scaleray.predict(preprocessed.run_dir, tmp_path / "b.csv", local=True)


@pytest.mark.combination
def test_adapters_are_merged_or_kept_as_the_run_says(tmp_path, classes, empty_database):
    database = shutil.copy(empty_database, tmp_path / "mlflow.db")
    for merge in (True, False):
        record = scaleray.train(
            {
                "workload.name": f"{classes.__file__}:Points",
                "batch.global_size": 8,
                "optimizer.learning_rate": 0.1,
                "stop.after": "4 steps",
                "fine_tuning.lora_rank": 2,
                "fine_tuning.lora_layers": ["0"],
                "fine_tuning.merge": merge,
                "checkpoint.every": "4 steps",
                "checkpoint.storage_path": str(tmp_path),
                "tracking.uri": f"sqlite:///{database}",
                "tracking.system_metrics": False,
            },
            local=True,
        )
        final, stored = scaleray.load(record.run_dir), scaleray.load(record.run_dir, step=4)
        assert hasattr(final.module[0], "lora_a") is hasattr(stored.module[0], "lora_a") is (not merge)
        rows = torch.randn(5, 4)
        torch.testing.assert_close(final.module(rows), stored.module(rows))


def test_what_is_sent_to_other_processes_builds_the_same_model(run):
    parts = find_parts(run)
    assert_same(parts.build().module, dict(parts.weights.tensors))


@pytest.mark.combination
def test_a_workloads_own_state_comes_back_with_the_weights_of_its_step(trained, tmp_path):
    config = {
        **trained.config,
        "workload": {**trained.config["workload"], "name": trained.config["workload"]["name"].replace(":Points", ":Counting")},
        "checkpoint": {**trained.config["checkpoint"], "storage_path": str(tmp_path)},
    }  # fmt: skip
    run = scaleray.train(config, local=True).run_dir
    early, last = scaleray.load(run, step=8).workload, scaleray.load(run).workload
    assert (early.seen, last.seen) == (64, 192)  # batches of 8
    assert last.mean.shape == (4,) and not torch.equal(early.mean, last.mean)
