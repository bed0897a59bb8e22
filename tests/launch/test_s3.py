"""Storage and data in an S3 bucket, here of a local emulator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import scaleray
from scaleray.errors import StorageError

HERE = Path(__file__).parent


@pytest.fixture
def bucket(monkeypatch):
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_REGION": "us-east-1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    import pyarrow.fs

    filesystem = pyarrow.fs.S3FileSystem(endpoint_override=f"http://{host}:{port}", allow_bucket_creation=True)
    filesystem.create_dir("bucket")
    yield filesystem
    server.stop()


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
    assert {"config.yaml", "record.json", "steps.csv", "weights.pt"} <= files
    from mlflow import MlflowClient

    assert [f.path for f in MlflowClient(record.tracking_uri).list_artifacts(record.run_id, "model")] == [
        "model/weights.pt"
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
