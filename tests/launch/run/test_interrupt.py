"""A run that is stopped, or that shares its machine with another cluster: nothing is lost, nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked_command import ForkedCommand
from waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900), pytest.mark.usefixtures("mlflow_database")]

HERE = Path(__file__).parent.parent
ROOT = HERE.parent.parent


def options(tmp_path, **more):
    values = {
        "workload.name": f"{HERE / 'workloads.py'}:Endless",
        "workload.args.marker": tmp_path / "marker",
        "batch.global-size": 16,
        "optimizer.learning-rate": 0.01,
        "stop.after": "1000000 steps",
        "scale.workers": 2,
        "tracking.uri": f"sqlite:///{tmp_path / 'mlflow.db'}",
        "tracking.every-steps": 100,
        "checkpoint.storage-path": tmp_path / "runs",
    }
    return [word for key, value in {**values, **more}.items() for word in (f"--{key}", str(value))]


def run_status(tmp_path):
    """The status of the one run in the test's database; None before there is one, as workers may be faster.

    Read without MLflow, which would make the tables of a new database in a race with the run itself.
    """
    with (
        contextlib.suppress(sqlite3.OperationalError),
        contextlib.closing(sqlite3.connect(f"file:{tmp_path / 'mlflow.db'}?mode=ro", uri=True)) as database,
    ):
        statuses = [status for (status,) in database.execute("select status from runs")]
        assert len(statuses) <= 1
        return statuses[0] if statuses else None


# Ray's own, one a cluster: they outlive every job and are no part of a run
CLUSTER_ACTORS = ("JobSupervisor", "_AutoscalingCoordinatorActor", "_StatsActor", "ActorLocationTracker")


def train_actors():
    """Actors of runs that are still alive on the session's cluster, detached helpers included."""
    import ray
    from ray.util.state import list_actors

    address = ray.get_runtime_context().gcs_address  # there may be other clusters on the machine
    alive = list_actors(address, filters=[("state", "=", "ALIVE")], limit=1000)
    return [a.class_name for a in alive if not a.class_name.endswith(CLUSTER_ACTORS)]


def wait_for_no_actors():
    """Everything of the run is gone within half a minute; says what is not."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and train_actors():
        time.sleep(0.5)
    assert train_actors() == []


def placement_groups():
    import ray

    return [g for g in ray.util.placement_group_table().values() if g["state"] == "CREATED"]


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.combination), signal.SIGTERM])
def test_a_signal_ends_the_run_as_killed_and_frees_everything(ray_session, tmp_path, number):
    environment = {**os.environ, "RAY_ADDRESS": ray_session.address}
    process = ForkedCommand(["train", *options(tmp_path)], cwd=ROOT, environment=environment)
    wait_until(lambda: (tmp_path / "marker").exists() or process.poll() is not None)
    process.send_signal(number)
    output = "".join(process.communicate(timeout=600))
    assert process.returncode == 130, output
    assert "stopped; the MLflow run is marked KILLED" in output
    assert "Traceback" not in output
    assert run_status(tmp_path) == "KILLED"
    wait_until(lambda: not placement_groups())
    wait_for_no_actors()


@pytest.mark.combination
def test_ray_job_stop_ends_the_run_as_killed_and_frees_everything(ray_session, tmp_path):
    ray_cli = [sys.executable, "-m", "ray.scripts.scripts", "job"]
    name = f"stop-{os.getpid()}"
    submit = [
        *ray_cli,
        "submit",
        "--no-wait",
        "--working-dir",
        str(ROOT),
        "--submission-id",
        name,
        "--runtime-env-json",
        json.dumps({"excludes": ["tests/models/conftest.py"]}),
        "--",
        "python",
        "-m",
        "scaleray",
        "train",
        *options(tmp_path, **{"stop.after": "'1000000 steps'"}),
    ]
    subprocess.run(submit, env=ray_session.environment(), check=True, capture_output=True, timeout=600)
    wait_until(lambda: (tmp_path / "marker").exists() and run_status(tmp_path) == "RUNNING")
    subprocess.run(
        [*ray_cli, "stop", name], env=ray_session.environment(), check=True, capture_output=True, timeout=600
    )
    wait_until(lambda: run_status(tmp_path) == "KILLED")
    wait_until(lambda: not placement_groups())
    wait_for_no_actors()


@pytest.mark.slow
def test_a_second_cluster_on_the_machine_does_not_disturb_a_run(tmp_path):
    from scaleray.launch.cluster.head import local_head

    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "scaleray", "train", "--json", *options(tmp_path, **{"stop.after": "4000 steps"})]
    process = subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: (tmp_path / "marker").exists() or process.poll() is not None)
    with local_head(num_cpus=1):
        output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    record = json.loads(output)
    assert record["status"] == "FINISHED"
    assert record["steps"] == 4000
