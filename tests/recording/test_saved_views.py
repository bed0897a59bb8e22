"""The page of an experiment's trainings in MLflow, and what every run says of where it comes from."""

import getpass

import pytest
from mlflow import MlflowClient

from scaleray.common import own_folder
from scaleray.recording import provenance, saved_views
from scaleray.recording.store import RunStore
from scaleray.recording.study_runs import ParentRun
from scaleray.records.mlflow_operations import LogDataset, LogMetrics, LogParams


@pytest.fixture
def store(uri):
    """A training in MLflow."""
    tags = {"scaleray.kind": "train", **provenance.source_tags("work.py:Mine", {"commit": "c0ffee", "is_dirty": True})}
    made = RunStore.create(uri, experiment="digits", run_name="a", tags=tags)
    made.send(LogParams({"topology.workers": 2, "derived.learning_rate": 0.1}))
    made.send(LogMetrics([("train/loss", 1.0, 0, 1), ("test/accuracy", 0.9, 0, 1)]))
    return made


def view_in(uri, store):
    tags = MlflowClient(uri).get_experiment(store.experiment_id).tags
    return saved_views.state_of(tags[f"{saved_views.TAG}{saved_views.TRAININGS}"])


def test_the_table_has_what_tells_runs_apart_and_the_evaluation_metric_is_first(uri, store):
    saved_views.save_trainings(store.client, store.experiment_id, ["test/accuracy", "test/loss"])
    state = view_in(uri, store)
    for column in (
        "params.`topology.workers`",
        "params.`derived.global_batch_size`",
        "params.`derived.learning_rate`",
        "metrics.`test/accuracy`",
        "attributes.`User`",
    ):
        assert column in state["selectedColumns"]
    charts = [chart["metricKey"] for chart in state["compareRunCharts"]]
    assert charts[:3] == ["test/accuracy", "test/loss", "train/loss"] and charts.index("perf/samples_per_s") > 2
    columns = [name for name in state["selectedColumns"] if name.startswith("metrics.")]
    assert columns[:3] == ["metrics.`test/accuracy`", "metrics.`test/loss`", "metrics.`train/loss`"]
    assert state["orderByKey"] == "attributes.start_time" and not state["orderByAsc"]
    (found,) = store.client.search_runs([store.experiment_id], state["searchFilter"])
    assert found.info.run_id == store.run_id


def test_a_run_with_other_metrics_adds_its_columns_and_the_same_ones_change_nothing(uri, store):
    saved_views.save_trainings(store.client, store.experiment_id, ["test/accuracy"])
    saved_views.save_trainings(store.client, store.experiment_id, ["val/bleu"])
    state = view_in(uri, store)
    assert {"metrics.`test/accuracy`", "metrics.`val/bleu`"} <= set(state["selectedColumns"])
    before = MlflowClient(uri).get_experiment(store.experiment_id).tags
    saved_views.save_trainings(store.client, store.experiment_id, ["test/accuracy"])
    assert MlflowClient(uri).get_experiment(store.experiment_id).tags == before


def test_a_view_of_many_metrics_fits_into_a_tag(store):
    saved_views.save_trainings(
        store.client, store.experiment_id, [f"validation_{number}/a_long_name_of_a_metric" for number in range(40)]
    )
    tags = store.client.get_experiment(store.experiment_id).tags
    assert len(tags[f"{saved_views.TAG}{saved_views.TRAININGS}"]) < saved_views.LONGEST_TAG


def test_owner_source_and_commit_are_those_that_mlflow_shows(uri, store):
    run = MlflowClient(uri).get_run(store.run_id)
    assert run.data.tags["mlflow.user"] == getpass.getuser() and run.data.tags["mlflow.source.git.commit"] == "c0ffee"
    assert run.data.tags["mlflow.source.name"] == "work.py:Mine" and run.data.tags["scaleray.git_is_dirty"] == "true"


def test_a_user_without_a_name_and_a_folder_without_git_are_left_out(monkeypatch):
    def nobody():
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr(own_folder.getpass, "getuser", nobody)
    assert own_folder.user_or_somebody() == "somebody"
    assert provenance.source_tags("w", {}).keys() == {"scaleray.workload", "mlflow.source.name", "mlflow.source.type"}


@pytest.mark.parametrize(("split", "context"), [("train", "training"), ("val", "evaluation")])
def test_a_split_is_a_dataset_with_its_digest(uri, store, split, context):
    store.send(LogDataset(**provenance.dataset(split, {"sha256": "ab" * 32, "rows": 5}, workload="w")))
    (found,) = MlflowClient(uri).get_run(store.run_id).inputs.dataset_inputs
    assert found.dataset.digest == ("ab" * 32)[:32] and found.tags[0].value == context


def test_a_study_has_its_datasets_as_a_training_has(uri):
    datasets = [provenance.dataset(split, {"sha256": "cd" * 32}, workload="w") for split in ("train", "val")]
    run = ParentRun.open(uri, "studies", kind="scaling-study", name="study", config={}, datasets=datasets)
    assert run.finish(None) is None
    found = MlflowClient(uri).get_run(run.run_id).inputs.dataset_inputs
    assert sorted(one.dataset.name for one in found) == ["train", "val"]


def test_the_link_opens_the_table(uri, store):
    link = saved_views.trainings_link(uri, store.experiment_id)
    assert link.endswith(
        f"/#/experiments/{store.experiment_id}/runs?workflowType=machine_learning&viewStateShareKey={saved_views.TRAININGS}"
    )
