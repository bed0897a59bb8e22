"""A real MLflow server that is killed and comes back while a run goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request

import pytest

from scaleray.launch.cluster.own_ray import free_port
from scaleray.recording.recorder import Recorder
from scaleray.records.run_description import RunDescription
from scaleray.records.run_record import StepRecord

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def start_server(folder, port):
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--backend-store-uri",
        f"sqlite:///{folder / 'mlflow.db'}",
        "--artifacts-destination",
        str(folder / "artifacts"),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
            return process
        except OSError:
            time.sleep(0.5)
    raise AssertionError("the MLflow server did not start")


def stop_server(process):
    import psutil

    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        member.kill()
    psutil.wait_procs(family, timeout=20)
    process.wait(timeout=20)


def steps(numbers):
    return [
        StepRecord(
            step=n,
            loss=1.0,
            count=1,
            num_samples=1,
            learning_rate=0.1,
            grad_norm=None,
            step_time_s=0.1,
            input_wait_s=0.0,
            epoch=0.1,
        )
        for n in numbers
    ]


def test_a_run_survives_the_death_and_return_of_its_server(tmp_path):
    from mlflow import MlflowClient

    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    server = start_server(tmp_path, port)
    try:
        recorder = Recorder(
            RunDescription(
                tracking_uri=uri,
                experiment="e",
                run_name="r",
                work_dir=str(tmp_path / "run"),
                every_steps=1,
                params={},
                tags={},
                files={},
            )
        )
        run_id = recorder.start().run_id
        recorder.log(steps([1, 2]))
        recorder.drain()
        stop_server(server)
        recorder.log(steps([3, 4]))
        assert recorder.drain().unsent_file
        server = start_server(tmp_path, port)
        deadline = time.monotonic() + 600
        while recorder.drain().unsent_file and time.monotonic() < deadline:
            time.sleep(1)
        recorder.log(steps([5]))
        assert recorder.finish("FINISHED", metrics={}, tags={}, files={}) is None
        client = MlflowClient(uri)
        assert [m.step for m in client.get_metric_history(run_id, "train/loss")] == [1, 2, 3, 4, 5]
        assert client.get_run(run_id).info.status == "FINISHED"
        assert {f.path for f in client.list_artifacts(run_id)} == {"steps.csv"}
    finally:
        stop_server(server)
