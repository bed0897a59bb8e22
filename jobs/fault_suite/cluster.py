"""A Ray cluster of several nodes on this machine, whose nodes can be killed and drained one by one."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

# Ray's own, one a cluster: they outlive every job and are no part of a run
CLUSTER_ACTORS = ("JobSupervisor", "_AutoscalingCoordinatorActor", "_StatsActor")
NUM_NODES = 3
"""With workers, beside the head: two are enough for two workers, so that one may go away."""


class Nodes:
    """The cluster. Nodes for workers have addresses of their own and the label role=train; the head has neither."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": True, "dashboard_port": 0}
        )
        self._last_address = 1
        self.nodes: list[Any] = []
        for _ in range(NUM_NODES):
            self.add()

    @property
    def address(self) -> str:
        """host:port of the control store, for RAY_ADDRESS."""
        return str(self.cluster.address)

    def environment(self) -> dict[str, str]:
        """Environment of a driver of this cluster."""
        return {**os.environ, "RAY_ADDRESS": self.address}

    def add(self) -> None:
        """One more node for a worker. In the main thread only."""
        self._last_address += 1
        self.nodes.append(
            self.cluster.add_node(num_cpus=1, node_ip_address=f"127.0.0.{self._last_address}", labels={"role": "train"})
        )

    def at(self, process: int) -> Any:
        """The node on which a worker process runs."""
        parents = {parent.pid for parent in psutil.Process(process).parents()}
        return next(node for node in self.nodes if raylet_of(node) in parents)

    def kill(self, node: Any) -> None:
        """SIGKILL to the node's raylet, and so to all on it."""
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def drain(self, node: Any, *, seconds: int) -> bool:
        """Announce, as a cloud would, that the node goes away in so many seconds; true when Ray accepted that."""
        command = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "drain-node",
            "--address",
            self.address,
            "--node-id",
            node.node_id,
            "--reason",
            "DRAIN_NODE_REASON_PREEMPTION",
            "--reason-message",
            "fault suite",
            "--deadline-remaining-seconds",
            str(seconds),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return done.returncode == 0

    def actors(self) -> list[Any]:
        """Actors of runs that are alive."""
        from ray.util.state import list_actors

        found = list_actors(self._dashboard, filters=[("state", "=", "ALIVE")], limit=1000)
        return [actor for actor in found if not actor.class_name.endswith(CLUSTER_ACTORS)]

    def placement_groups(self) -> list[Any]:
        """Placement groups that hold or want resources."""
        from ray.util.state import list_placement_groups

        return [g for g in list_placement_groups(self._dashboard, limit=1000) if g.state != "REMOVED"]

    def wait_until_empty(self, processes: set[int], *, seconds: float = 40.0) -> list[str]:
        """What is left of the runs after a while: actors, placement groups, and these processes; nothing is as it should be."""
        deadline = time.monotonic() + seconds
        while True:
            left = [f"actor {actor.class_name}" for actor in self.actors()]
            left += [f"placement group {group.placement_group_id}" for group in self.placement_groups()]
            left += [f"process {pid}" for pid in processes if _is_alive(pid)]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.5)

    @property
    def _dashboard(self) -> str:
        return f"http://{self.cluster.webui_url}"


def raylet_of(node: Any) -> int:
    """Process id of a node's raylet."""
    from ray._private.ray_constants import PROCESS_TYPE_RAYLET

    return int(node.all_processes[PROCESS_TYPE_RAYLET][0].process.pid)


@contextlib.contextmanager
def local_nodes() -> Iterator[Nodes]:
    """A cluster of its own for as long as the context lasts. Call it before anything imports Ray."""
    folder = Path(tempfile.mkdtemp(prefix="srf-", dir="/tmp"))  # short: a socket's path holds 107 characters
    (folder / "ray").mkdir()
    os.environ |= {"RAY_TMPDIR": str(folder), "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ.pop("RAY_ADDRESS", None)
    nodes = None
    try:
        nodes = Nodes()
        yield nodes
    finally:
        family = psutil.Process().children(recursive=True)
        if nodes is not None:
            with contextlib.suppress(Exception):  # nodes that were killed are gone already
                nodes.cluster.shutdown()
        for process in family:  # what a killed raylet could not take along
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=10)
        shutil.rmtree(folder, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
