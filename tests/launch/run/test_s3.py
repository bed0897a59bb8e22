"""Storage and data in an S3 bucket, here of a local emulator."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter

import scaleray
from scaleray.checkpoints.storage import Store
from scaleray.errors import StorageError
from scaleray.records.sweep_record import SweepRecord

HERE = Path(__file__).parent.parent


@pytest.mark.combination
def test_a_run_reads_parquet_from_s3_and_keeps_its_files_there(bucket, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    columns = {
        "x": pa.FixedSizeListArray.from_arrays(x.reshape(-1), 4),
        "y": pa.FixedSizeListArray.from_arrays(x.sum(axis=1), 1),
    }
    pq.write_table(pa.table(columns), "bucket/data/part.parquet", filesystem=bucket, row_group_size=20)
    record = scaleray.train(
        {
            "workload.name": f"{HERE / 'workloads.py'}:FromParquet",
            "workload.args": {"path": "s3://bucket/data"},
            "batch.global_size": 16,
            "optimizer.learning_rate": 0.05,
            "stop.after": "8 steps",
            "tracking.uri": f"sqlite:///{tmp_path / 'mlflow.db'}",
            "checkpoint.storage_path": "s3://bucket/runs",
        },
        local=True,
    )
    assert record.run_dir.startswith("s3://bucket/runs/")
    import pyarrow.fs

    folder = record.run_dir.removeprefix("s3://")
    files = {Path(f.path).name for f in bucket.get_file_info(pyarrow.fs.FileSelector(folder))}
    assert {"config.yaml", "record.json", "steps.csv", "weights.pt", "alerts.jsonl"} <= files
    from mlflow import MlflowClient

    assert [f.path for f in MlflowClient(record.tracking_uri).list_artifacts(record.run_id, "model")] == [
        "model/weights.pt",
        "model/weights.sha256.json",
    ]


def test_a_bucket_that_does_not_exist_is_named(bucket, tmp_path):
    with pytest.raises(StorageError, match=r"s3://nowhere/runs"):
        scaleray.train(
            {
                "workload.name": f"{HERE / 'workloads.py'}:Line",
                "batch.global_size": 16,
                "optimizer.learning_rate": 0.05,
                "stop.after": "8 steps",
                "tracking.uri": f"sqlite:///{tmp_path / 'mlflow.db'}",
                "checkpoint.storage_path": "s3://nowhere/runs",
            },
            local=True,
        )


def sweeps_of(tmp_path):
    return f"s3://bucket/{tmp_path.name}"  # the server keeps what other tests have left in the bucket


def start_sweep(tmp_path, *words):
    """The command on a cluster of its own, whose workers know of the bucket too."""
    flags = {
        "workload.name": f"{HERE / 'workloads.py'}:Sweepable",
        "workload.args": '{"seconds": 0.05}',
        "batch.global_size": 8,
        "optimizer.learning_rate": 0.01,
        "stop.after": "6 epochs",
        "evaluation.every": "1 epoch",
        "optimizer.name": "sgd",
        "optimizer.momentum": 0.0,
        "tracking.uri": f"sqlite:///{tmp_path / 'mlflow.db'}",
        "checkpoint.storage_path": sweeps_of(tmp_path),
    }
    given = [] if "--continue" in words else [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    return subprocess.Popen(
        [sys.executable, "-m", "scaleray", "sweep", *words, *given],
        env=environment,
        cwd=HERE.parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def trials_in(store):
    return {e.name: store.read(e.name) for e in store.entries("") if "/trials/" in e.name}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sweep_in_a_bucket_is_interrupted_and_continued(bucket, tmp_path):
    process = start_sweep(tmp_path, "--batch-sizes", "8,16", "--seeds", "3", "--workers-per-trial", "2")
    store = Store(sweeps_of(tmp_path))
    deadline = time.monotonic() + 600
    while process.poll() is None and len(trials_in(store)) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 130 and f"to continue: scaleray sweep --continue {sweeps_of(tmp_path)}/" in output, (
        output
    )
    before = trials_in(store)
    assert 2 <= len(before) < 6
    (name,) = store.names()
    process = start_sweep(tmp_path, "--continue", f"{sweeps_of(tmp_path)}/{name}")
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    after = trials_in(store)
    assert len(after) == 6 and {n: text for n, text in after.items() if n in before} == before
    record = TypeAdapter(SweepRecord).validate_json(store.read(f"{name}/record.json"))
    assert [t.number for t in record.trials] == list(range(6)) and {t.status for t in record.trials} == {"finished"}
    assert f"{name}/report.html" in store.names(name)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_states_of_a_population_lie_in_the_bucket_and_are_removed(bucket, tmp_path):
    process = start_sweep(tmp_path, "--learning-rates", "1e-6,1e-5,1e-4,1e-2", "--scheduler", "pbt")
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    store = Store(sweeps_of(tmp_path))
    (name,) = store.names()
    record = TypeAdapter(SweepRecord).validate_json(store.read(f"{name}/record.json"))
    assert {t.status for t in record.trials} == {"finished"}
    assert any(t.settings.get("mutations") for t in record.trials)
    assert not {f"{name}/states", f"{name}/ray_tune"} & set(store.names(name))
