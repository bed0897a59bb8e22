"""Whole runs on Ray: what a user sees in the record, in the run folder and in MLflow."""

from __future__ import annotations

import csv
import json
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch

import scaleray
from scaleray.errors import ConfigError, DataError, InputStarvedError, RunFailedError
from scaleray.records.run_record import EventRecord, RunRecord
from scaleray.records.start import PARTS

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900), pytest.mark.usefixtures("mlflow_database")]

HERE = Path(__file__).parent.parent
ROOT = HERE.parent.parent


def settings(tmp_path, workload, **more):
    """A config for one of this folder's workloads, quick and with files under tmp_path."""
    return {
        "workload.name": f"{HERE / 'workloads.py'}:{workload}",
        "batch.global_size": 16,
        "optimizer.learning_rate": 0.05,
        "stop.after": "12 steps",
        "tracking.uri": f"sqlite:///{tmp_path / 'mlflow.db'}",
        "tracking.interval_s": 0.2,
        "tracking.every_steps": 1,
        "tracking.system_metrics": False,
        "checkpoint.storage_path": str(tmp_path / "runs"),
        **more,
    }


def losses(record):
    with open(Path(record.run_dir) / "steps.csv", newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def mlflow_run(record):
    from mlflow import MlflowClient

    client = MlflowClient(record.tracking_uri)
    return client, client.get_run(record.run_id)


@pytest.fixture(scope="module")
def digits(ray_session, tmp_path_factory):
    """Digits on 1 and on 2 workers at the same global batch; read by the worker, and by Ray's tasks."""
    folder = tmp_path_factory.mktemp("digits")
    records = {}
    for workers in (1, 2):
        config = scaleray.load_config(
            ROOT / "jobs" / "digits.yaml",
            flags={
                "scale.workers": workers,
                "data.readers": "auto" if workers == 1 else "ray",
                "tracking.uri": f"sqlite:///{folder / 'mlflow.db'}",
                "checkpoint.storage_path": str(folder / "runs"),
                "tracking.interval_s": 0.5,
            },
            environ={},
        )
        records[workers] = scaleray.train(config, base_dir=ROOT)
    return records


def test_digits_reach_97_percent_on_one_and_on_two_workers(digits):
    assert digits[1].metrics["test/accuracy"] >= 0.97
    assert digits[2].metrics["test/accuracy"] >= 0.97


def test_the_record_says_who_read_the_rows(digits):
    assert [digits[workers].data["train"]["read_by"] for workers in (1, 2)] == ["worker", "ray"]


def test_no_helper_was_started_that_the_runs_did_not_use(digits):
    import ray
    from ray.util.state import list_actors

    started = {a.class_name for a in list_actors(ray.get_runtime_context().gcs_address, limit=1000)}
    assert any(name.endswith("RayTrainWorker") for name in started), started
    assert not {"PlacementGroupCleaner", "DatasetManager"} & {name.rpartition(".")[2] for name in started}


def test_the_record_says_where_the_start_went(digits):
    for record in digits.values():
        assert tuple(record.start) == PARTS
        assert sum(record.start.values()) == pytest.approx(record.time_to_first_step_s)


def test_two_workers_repeat_the_training_of_one(digits):
    one, two = losses(digits[1]), losses(digits[2])
    assert len(one) == len(two) == 460
    # float32: the sums run in another order, which grows slowly through training
    np.testing.assert_allclose(one[:20], two[:20], rtol=1e-4)
    np.testing.assert_allclose(one, two, atol=2e-2)


def test_the_run_is_complete_in_mlflow(digits):
    record = digits[2]
    client, run = mlflow_run(record)
    assert run.info.status == "FINISHED"
    assert run.data.params["scale.workers"] == "2"
    assert run.data.params["derived.per_worker_batch_size"] == "32"
    assert run.data.metrics["point/world_size"] == 2
    assert run.data.metrics["test/accuracy"] == record.metrics["test/accuracy"]
    assert "MLflow" not in run.data.tags.get("scaleray.verdict", "")
    steps = [m.step for m in client.get_metric_history(record.run_id, "train/loss")]
    assert steps == sorted(set(steps))
    assert steps[-1] == 460
    names = {f.path for f in client.list_artifacts(record.run_id)}
    assert {"config.yaml", "derived.yaml", "environment.yaml", "record.json", "steps.csv", "model"} <= names
    dataset = next(i.dataset for i in run.inputs.dataset_inputs if i.dataset.name == "train")
    profile = json.loads(dataset.profile)
    assert profile["rows"] == 1458
    assert len(profile["sha256"]) == 64


def test_the_final_weights_load_as_a_plain_state_dict(digits):
    weights = torch.load(Path(digits[2].run_dir) / "weights.pt", weights_only=True)
    model = scaleray.workload.load_workload(str(ROOT / "jobs/digits.py") + ":Digits", {}).build_model()
    model.load_state_dict(weights)


def test_the_record_can_be_read_back(digits):
    read = RunRecord.read(Path(digits[2].run_dir) / "record.json")
    assert read.metrics == digits[2].metrics
    assert read.environment["topology"][0]["cpus"] == 6
    assert [w["rank"] for w in read.environment["workers"]] == [0, 1]


def test_the_metrics_of_a_run_are_at_rays_node_and_join_with_those_of_ray_train(ray_session, tmp_path):
    import ray
    from prometheus_client.parser import text_string_to_metric_families
    from waiting import wait_until

    from scaleray.common import metric_names as names

    (port,) = {node["MetricsExportPort"] for node in ray.nodes()}
    flags = settings(tmp_path, "Line", **{"scale.workers": 2, "monitoring.every_s": 0.01})
    record = scaleray.train({**flags, "tracking.run_name": "watched"})
    found = {}

    def is_published() -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        for sample in (sample for family in families for sample in family.samples):
            if sample.labels.get("ray_train_run_name") == "watched":
                found.setdefault(sample.name, {})[sample.labels.get("rank")] = sample.value, sample.labels
        own = any(name.startswith("ray_train_") for name in found)
        return own and {"ray_scaleray_run_finished", "ray_scaleray_phase_seconds"} <= set(found)

    wait_until(is_published)
    assert found["ray_scaleray_steps_total"][None][0] == record.steps
    assert set(found["ray_scaleray_step_time_seconds"]) == {"0", "1"}
    ours = {name for name in found if name.startswith("ray_scaleray_")}
    assert ours <= set(names.IN_PROMETHEUS) and len(ours) > 20
    for name in ours:
        for _, labels in found[name].values():
            assert set(names.IN_PROMETHEUS[name].all_labels) <= set(labels)


def test_no_environment_value_is_recorded(ray_session, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_SECRET_TOKEN", "hunter2-hunter2")
    record = scaleray.train(settings(tmp_path, "Line"), local=True)
    stored = [p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()]
    assert stored
    assert not any(b"hunter2-hunter2" in content for content in stored)
    assert record.status == "FINISHED"


def test_a_users_exception_arrives_once_with_rank_node_step_and_their_own_line(ray_session, tmp_path):
    with pytest.raises(RunFailedError) as caught:
        scaleray.train(settings(tmp_path, "Failing", **{"scale.workers": 2}))
    text = str(caught.value)
    assert "rank 1 on" in text
    assert "step 5" in text
    assert "the user's own mistake" in text
    assert "workloads.py" in text
    assert "loop.py" not in text
    assert _only_run(tmp_path).info.status == "FAILED"


def test_a_bad_label_is_explained_by_the_worker_that_met_it(ray_session, tmp_path):
    with pytest.raises(DataError, match="label or token"):
        scaleray.train(settings(tmp_path, "BadLabel", **{"scale.workers": 2}))


def test_a_killed_worker_is_restarted_without_doubled_points(ray_session, tmp_path):
    marker = tmp_path / "killed"
    options = {"scale.workers": 2, "scale.max_failures": 1, "workload.args": {"how": "kill", "marker": str(marker)}}
    record = scaleray.train(settings(tmp_path, "Failing", **options))
    assert marker.exists()
    assert record.status == "FINISHED"
    client, _ = mlflow_run(record)
    assert [m.step for m in client.get_metric_history(record.run_id, "train/loss")] == list(range(1, 13))
    assert len(losses(record)) == 12


def test_a_killed_worker_without_restarts_fails_the_run(ray_session, tmp_path):
    options = {"scale.workers": 2, "scale.max_failures": 0, "workload.args": {"how": "kill"}}
    with pytest.raises(RunFailedError, match="rank"):
        scaleray.train(settings(tmp_path, "Failing", **options))
    assert _only_run(tmp_path).info.status == "FAILED"


@pytest.mark.combination
def test_input_without_a_free_cpu_is_explained(ray_session, tmp_path):
    # the worker reads for itself at first; this run goes on for longer than that
    options = {"scale.cpus_per_worker": 6, "data.reserved_cpus": 0, "data.timeout_s": 6, "stop.after": "10000000 steps"}
    options["data.readers"] = "ray"
    messages = []
    with pytest.raises(InputStarvedError, match="0 of 6 CPUs free"):
        scaleray.train(settings(tmp_path, "Line", **options), show=messages.extend)
    warnings = [m.text for m in messages if isinstance(m, EventRecord)]
    assert any("input has delivered nothing" in text for text in warnings)


def test_a_parquet_folder_trains_like_arrays(ray_session, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq
    from workloads import Line  # the folder of the tests is on the path

    data = Line().datasets()["train"]
    table = pa.table(
        {
            "x": pa.FixedSizeListArray.from_arrays(data["x"].reshape(-1), 4),
            "y": pa.FixedSizeListArray.from_arrays(data["y"].reshape(-1), 1),
        }
    )
    (tmp_path / "data").mkdir()
    pq.write_table(table, tmp_path / "data" / "part.parquet", row_group_size=10)
    options = {"scale.workers": 2, "data.shuffle": False}
    parquet = scaleray.train(
        settings(tmp_path, "FromParquet", **options, **{"workload.args": {"path": str(tmp_path / "data")}})
    )
    arrays = scaleray.train(settings(tmp_path, "Line", **{"data.shuffle": False}), local=True)
    np.testing.assert_allclose(losses(parquet), losses(arrays), rtol=1e-5)


@pytest.mark.slow
def test_random_transforms_read_by_tasks_are_those_of_one_process(ray_session, tmp_path):
    options = {"scale.workers": 2, "data.chunk_mib": 0.0005}  # many tasks
    on_ray = scaleray.train(settings(tmp_path, "RandomTransforms", **options))
    here = scaleray.train(settings(tmp_path, "RandomTransforms"), local=True)
    np.testing.assert_allclose(losses(on_ray), losses(here), rtol=1e-5)
    assert on_ray.metrics == pytest.approx(here.metrics, rel=1e-5)
    assert on_ray.sample_order == here.sample_order


def test_a_ray_dataset_streams_with_the_weaker_promise_stated(ray_session, tmp_path):
    record = scaleray.train(settings(tmp_path, "FromRayDataset", **{"scale.workers": 2}))
    assert record.sample_order.startswith("weak")
    assert "random numbers drawn by its own functions are not seeded" in record.sample_order
    assert record.steps == 12
    assert losses(record)[-1] < losses(record)[0]


def test_a_run_name_in_use_is_refused(ray_session, tmp_path):
    options = settings(tmp_path, "Line", **{"tracking.run_name": "mine"})
    scaleray.train(options, local=True)
    with pytest.raises(ConfigError, match="exists already"):
        scaleray.train(options)


def _only_run(tmp_path):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("scaleray")
    (run,) = client.search_runs([experiment.experiment_id])
    return run
