"""A cluster of several nodes on this machine: ranks follow nodes, labels choose them, the input crosses them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]

HERE = Path(__file__).parents[1] / "launch"

# In a process of its own: Ray's test cluster and the session's head cannot share a driver.
CLUSTER = """
import os, subprocess, sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": True, "dashboard_port": 0})
try:
    for number, zone in ((2, "a"), (3, "a"), (4, "b")):
        cluster.add_node(num_cpus=2, node_ip_address=f"127.0.0.{number}", labels={"zone": zone})
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    sys.exit(subprocess.run([sys.executable, "-m", "scaleray", "train", "--json", *sys.argv[1:]], env=environment).returncode)
finally:
    cluster.shutdown()
"""


def train(tmp_path, *options):
    ray_folder = tempfile.mkdtemp(prefix="srn-", dir="/tmp")  # short: a socket's path holds 107 characters
    Path(ray_folder, "ray").mkdir()
    environment = {**os.environ, "RAY_TMPDIR": ray_folder, "RAY_AUTH_MODE": "disabled"}
    environment.pop("RAY_ADDRESS", None)
    command = [
        sys.executable,
        "-c",
        CLUSTER,
        "--workload.name",
        f"{HERE / 'workloads.py'}:Line",
        "--batch.global-size",
        "16",
        "--optimizer.learning-rate",
        "0.05",
        "--stop.after",
        "12 steps",
        "--tracking.uri",
        f"sqlite:///{tmp_path / 'mlflow.db'}",
        "--checkpoint.storage-path",
        str(tmp_path / "runs"),
        *options,
    ]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    finally:
        shutil.rmtree(ray_folder, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_ranks_are_ordered_by_node_and_only_labelled_nodes_are_used(tmp_path):
    record = train(tmp_path, "--scale.workers", "4", "--scale.label-selector", "{zone: a}")
    nodes = [worker["node"] for worker in record["environment"]["workers"]]
    assert sorted(set(nodes)) == ["127.0.0.2", "127.0.0.3"]
    assert nodes[0] == nodes[1]
    assert nodes[2] == nodes[3]
    assert record["steps"] == 12
    assert len(record["environment"]["topology"]) == 4
