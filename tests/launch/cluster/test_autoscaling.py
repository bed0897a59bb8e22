"""A cluster that has no node for workers until somebody asks: Ray's own provider of nodes that are processes.

The machine is a namespace of this one (`machines.py`), so that root is needed: Ray's own class for such a cluster ends
every other Ray of the machine.
"""

from __future__ import annotations

import json
import shutil

import pytest
from machines import machines
from ray_machines import WORKLOADS, RayMachines

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1500)]

HEAD = "f" * 51 + "00000"
"""What Ray's provider takes for the head."""
COMMANDS = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
NODES = {
    "cluster_name": "grows", "max_workers": 3, "idle_timeout_minutes": 10, "head_node_type": "ray.head.default",
    # by its class: `fake_multinode` wants a file that Ray's wheel lacks
    "provider": {
        "type": "external", "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
        "launch_multiple": True, "head_node_id": HEAD, "disable_node_updaters": True,
        "disable_launch_config_check": True,
    },
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "large": {
            "resources": {"CPU": 8, "object_store_memory": 100_000_000},
            "node_config": {}, "min_workers": 0, "max_workers": 3,
        },
    },
    "auth": {}, "file_mounts": {}, **{f"{key}_commands": [] for key in COMMANDS}, "cluster_synced_files": [],
    "rsync_exclude": [], "rsync_filter": [],
    "file_mounts_sync_continuously": False, "upscaling_speed": 100.0, "docker": {},
}  # fmt: skip
OPTIONS = {
    "workload.name": f"{WORKLOADS}:Line", "batch.global-size": "16", "optimizer.learning-rate": "0.01",
    "stop.after": "4 steps", "scale.placement": "STRICT_SPREAD",
}  # fmt: skip


@pytest.fixture(scope="module")
def growing(tmp_path_factory, empty_database):
    """A Ray whose head has no CPUs, and whose autoscaler starts at most three nodes of 8 CPUs."""
    folder = tmp_path_factory.mktemp("growing")
    shutil.copy(empty_database, folder / "mlflow.db")
    (folder / "nodes.json").write_text(json.dumps(NODES))
    with machines(1, folder) as [head]:
        ray = RayMachines(head, folder)
        ray.start(
            "--num-cpus=0",
            f"--autoscaling-config={folder}/nodes.json",
            RAY_FAKE_CLUSTER="1",
            RAY_enable_autoscaler_v2="1",
            RAY_CLOUD_INSTANCE_ID=HEAD,
            RAY_OVERRIDE_NODE_ID_FOR_TESTING=HEAD,
            AUTOSCALER_UPDATE_INTERVAL_S="1",
        )
        yield ray


def test_a_cluster_without_nodes_starts_as_many_as_the_workers_want_and_is_waited_for(growing):
    process = growing.train(growing.head, "spread", {**OPTIONS, "scale.workers": "2", "scale.wait-for-nodes-s": "600"})
    assert process.wait(timeout=850) == 0, growing.said("spread")
    record = growing.record("spread")
    assert record["status"] == "FINISHED" and record["steps"] == 4
    head, *others = [node["cpus"] for node in record["environment"]["topology"]]
    # two, where one large node has room for both workers; three, where Ray has tried one again on a loaded machine
    assert head == 0 and others in ([8, 8], [8, 8, 8])
    assert "waiting for nodes of the cluster" in (growing.folder / "spread.log").read_text()


def test_what_has_come_at_the_deadline_is_said(growing):
    process = growing.train(growing.head, "many", {**OPTIONS, "scale.workers": "4", "scale.wait-for-nodes-s": "20"})
    assert process.wait(timeout=600) == 2, growing.said("many")
    said = " ".join(growing.said("many").split())
    assert "4 workers of 1 CPU (STRICT_SPREAD)" in said and "after 20 s of waiting" in said
    assert "nodes with" in said and "CPUs and 0 GPUs in all and can hold" in said
