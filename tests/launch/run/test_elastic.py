"""A run whose number of workers changes while it runs: a node comes, a node goes, and the training stays the same."""

from __future__ import annotations

import csv
import itertools
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from scaleray import train

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]

HERE = Path(__file__).parent.parent

# In a process of its own: Ray's test cluster and the session's head cannot share a driver. The node that comes is taken
# away again by killing its raylet, as a spot machine goes.
CLUSTER = """
import csv, os, subprocess, sys, time
from pathlib import Path
from ray.cluster_utils import Cluster

steps_file, run = Path(sys.argv[1]), sys.argv[2:]

def wait_for_step(number, workers):
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and process.poll() is None:
        rows = list(csv.DictReader(steps_file.open())) if steps_file.exists() else []
        if rows and int(rows[-1]["step"] or 0) >= number and workers in (None, rows[-1].get("world_size")):
            return int(rows[-1]["step"])
        time.sleep(0.3)
    sys.exit(f"step {number} on {workers} workers was not seen")

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": True, "dashboard_port": 0})
cluster.add_node(num_cpus=2, node_ip_address="127.0.0.2")
environment = {**os.environ, "RAY_ADDRESS": cluster.address}
process = subprocess.Popen([sys.executable, "-m", "scaleray", "train", "--json", *run], env=environment)
try:
    seen = wait_for_step(30, "1")
    node = cluster.add_node(num_cpus=2, node_ip_address="127.0.0.3")
    seen = wait_for_step(seen, "2")
    seen = wait_for_step(seen + 60, "2")
    cluster.remove_node(node, allow_graceful=False)
    wait_for_step(seen, "1")
    sys.exit(process.wait())
finally:
    if process.poll() is None:
        process.kill()
    cluster.shutdown()
"""

OPTIONS = {
    "workload.name": f"{HERE / 'workloads.py'}:Slow",
    "workload.args": "{rows: 100, seconds: 0.08}",
    "batch.global-size": "12",
    "optimizer.learning-rate": "0.01",
    "precision.dtype": "fp64",
    "stop.after": "900 steps",
    "checkpoint.every": "20 steps",
}


def run_elastic(tmp_path, *more):
    ray_folder = tempfile.mkdtemp(prefix="srn-", dir="/tmp")  # short: a socket's path holds 107 characters
    Path(ray_folder, "ray").mkdir()
    environment = {**os.environ, "RAY_TMPDIR": ray_folder, "RAY_AUTH_MODE": "disabled"}
    environment.pop("RAY_ADDRESS", None)
    folder = tmp_path / "runs" / "elastic"
    words = [word for key, value in OPTIONS.items() for word in (f"--{key}", value)]
    command = [
        sys.executable,
        "-c",
        CLUSTER,
        str(folder / "steps.csv"),
        *words,
        "--scale.workers",
        "{min: 1, max: 2}",
        "--scale.cpus-per-worker",
        "2",
        "--scale.resize-interval-s",
        "3",
        "--scale.launch-timeout-s",
        "15",
        "--tracking.uri",
        f"sqlite:///{tmp_path / 'mlflow.db'}",
        "--tracking.run-name",
        "elastic",
        "--tracking.interval-s",
        "0.5",
        "--checkpoint.storage-path",
        str(tmp_path / "runs"),
        *more,
    ]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    finally:
        shutil.rmtree(ray_folder, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = list(csv.DictReader((folder / "steps.csv").open()))
    return json.loads(done.stdout), rows


def test_workers_come_and_go_and_the_training_stays_the_same(tmp_path):
    record, rows = run_elastic(tmp_path)
    assert record["status"] == "FINISHED"
    assert [int(row["step"]) for row in rows] == list(range(1, 901)), "every step once"
    sizes = [int(row["world_size"]) for row in rows]
    changes = [b for a, b in itertools.pairwise(sizes) if a != b]
    assert sizes[0] == 1 and changes == [2, 1]

    alone = {key.replace("-", "_"): value for key, value in OPTIONS.items() if key != "workload.args"}
    alone |= {"workload.args.rows": 100, "workload.args.seconds": 0.0, "tracking.run_name": "alone"}
    alone |= {"tracking.uri": f"sqlite:///{tmp_path / 'alone.db'}", "checkpoint.storage_path": str(tmp_path / "runs")}
    train(alone, local=True)
    expected = list(csv.DictReader((tmp_path / "runs" / "alone" / "steps.csv").open()))
    for row, undisturbed in zip(rows, expected, strict=True):
        assert float(row["loss"]) == pytest.approx(float(undisturbed["loss"]), rel=1e-9)

    assert any("on 2 workers instead of 1" in event for event in record["events"])
    assert any("on 1 worker instead of 2" in event for event in record["events"])
    database = sqlite3.connect(tmp_path / "mlflow.db")
    tags = [value for (value,) in database.execute("select value from tags where key like 'scaleray.event.%'")]
    assert any("on 2 workers instead of 1" in tag for tag in tags)
    points = dict(database.execute("select step, value from metrics where key = 'perf/workers'"))
    assert set(points.values()) == {1.0, 2.0}
