"""Clusters of several nodes on this machine, which keep running after the command that started them has ended.

Every node is a separate Ray process at 127.0.0.1 with its own ports, which no other host can reach. To Ray they are
normal nodes, which it places work on, counts and loses separately. They share one machine and everything tied to its
address: Ray Train's local ranks, memory, the network."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from scaleray.common.http_client import HttpError, fetch
from scaleray.common.progress import stage
from scaleray.errors import ClusterError, UsageError
from scaleray.launch.cluster import local_state, loopback, node_process
from scaleray.launch.cluster.connection import set_auth_mode
from scaleray.launch.cluster.local_state import MARK, ClusterState, NodeState
from scaleray.launch.cluster.node_process import NodeProcess
from scaleray.launch.cluster.own_ray import free_port
from scaleray.launch.cluster.token import MODE, ensure_token, headers

HEAD = "head"
ANSWER_S = 10.0
GPUS_OF_LINUX = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class NodeNow:
    """A node of a cluster. state: `up`; `lost` if its processes have ended; `not seen` if they run but Ray does not
    list the node. resources: what Ray offers there."""

    name: str
    state: str
    pid: int
    resources: dict[str, float]
    log: str


@dataclass(frozen=True)
class LocalCluster:
    """Current state of a cluster on this machine. As a context manager, it ends the cluster.

    address: for RAY_ADDRESS. dashboard: URL to submit jobs to.
    """

    name: str
    address: str
    dashboard: str
    nodes: tuple[NodeNow, ...]

    @property
    def is_up(self) -> bool:
        """Whether all its nodes are up."""
        return all(node.state == "up" for node in self.nodes)

    def environment(self) -> dict[str, str]:
        """Environment variables with which `scaleray train`, `ray job` and other Ray programs find the cluster."""
        variables = {
            MODE: os.environ.get(MODE, "token"),
            "RAY_ADDRESS": self.address,
            "RAY_API_SERVER_ADDRESS": self.dashboard,
        }
        return {**variables, loopback.VARIABLE: "0"} if loopback.is_wanted() else variables

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        cluster_down(self.name)


def cluster_up(
    name: str = "local", *, nodes: int = 1, cpus: int | None = None, port: int | None = None
) -> LocalCluster:
    """Start a Ray cluster of several nodes on this machine, which runs until `cluster_down` or, in a `with` statement,
    until the end of the context.

    name: of at most 12 characters, to run several clusters at once. nodes: their number, including the head. cpus: CPUs
    that each node offers, possibly more than the machine has; None: one more than the machine has. port: of the head on
    127.0.0.1; None: a free one. Raises UsageError and then leaves nothing behind.
    """
    _check(num_nodes=nodes, cpus=cpus, port=port)
    cores = psutil.cpu_count() or 1
    # one more than the machine has: input tasks count in addition to the workers
    cpus = cpus or max(2, math.ceil((cores + 1) / nodes))
    _forget_if_gone(name)
    folder = local_state.new_folder(name)
    state = ClusterState(name, secrets.token_hex(16), f"127.0.0.1:{port or free_port()}", "", cpus)
    try:
        state = replace(state, dashboard=f"http://127.0.0.1:{free_port()}")
        state.save()
        set_auth_mode("local")
        ensure_token()
        state = _start(state, folder, nodes)
        return now(state)
    except BaseException:
        (local_state.load(name) or state).end()
        raise


def cluster_status(name: str | None = None) -> list[LocalCluster]:
    """Return the current state of the clusters that this user has started on this machine, or of the named one."""
    set_auth_mode("local")
    states = map(local_state.load, local_state.names() if name is None else [name])
    return [now(state) for state in states if state is not None]


def cluster_down(name: str = "local") -> int | None:
    """End a cluster on this machine with all its processes; return how many of its nodes were running, or None if no
    cluster of this name is up."""
    state = local_state.load(name)
    if state is None:
        with contextlib.suppress(OSError):
            local_state.folder_of(name).rmdir()  # left by a start that was killed before it had written anything
        return None
    return state.end()


def now(state: ClusterState) -> LocalCluster:
    """State of a cluster, from its processes and its head."""
    known = {node["node_name"]: node for node in _nodes_of_ray(state.dashboard) if node.get("state") == "ALIVE"}
    nodes = []
    for node in state.nodes:
        about = known.get("127.0.0.1" if node.name == HEAD else node.name, {})
        health = ("up" if about else "not seen") if node.is_running else "lost"
        resources = {k: v for k, v in (about.get("resources_total") or {}).items() if k in ("CPU", "GPU")}
        nodes.append(NodeNow(node.name, health, node.pid, resources, node.log))
    return LocalCluster(state.name, state.address, state.dashboard, tuple(nodes))


def shares_of(devices: Sequence[str], num_nodes: int) -> list[list[str]]:
    """Divide the machine's GPUs among its nodes, neighbours together; the first nodes may get one more."""
    small, more = divmod(len(devices), num_nodes)
    ends = [sum(small + (n < more) for n in range(count)) for count in range(num_nodes + 1)]
    return [list(devices[begin:end]) for begin, end in itertools.pairwise(ends)]


def _start(state: ClusterState, folder: Path, num_nodes: int) -> ClusterState:
    """Start the nodes, and record each as soon as it has a process."""
    environments = [{MARK: state.mark, **gpus} for gpus in _gpus(num_nodes)]

    def remember(name: str, node: NodeProcess) -> ClusterState:
        started_at = psutil.Process(node.process.pid).create_time()
        known = NodeState(name, node.process.pid, started_at, str(node.log))
        remembered = replace(state, nodes=(*state.nodes, known))
        remembered.save()
        return remembered

    def of_node(name: str) -> Path:
        (folder / name).mkdir(mode=0o700)
        return folder / name

    with stage(f"starting the head of {num_nodes} node{'s' if num_nodes > 1 else ''}"):
        head = node_process.start_head(
            of_node(HEAD),
            port=int(state.address.rpartition(":")[2]),
            dashboard_port=int(state.dashboard.rpartition(":")[2]),
            num_cpus=state.cpus,
            environment=environments[0],
            temp_dir=folder / HEAD,
            outlives=True,
        )
        state = remember(HEAD, head)
        node_process.wait_for_head(head, state.dashboard)
    others: list[NodeProcess] = []
    with stage("starting the other nodes" if num_nodes > 1 else "waiting for the head to be ready"):
        for number, environment in enumerate(environments[1:], start=1):
            name = f"node-{number}"
            node = node_process.start_worker(
                of_node(name),
                state.address,
                name=name,
                num_cpus=state.cpus,
                environment=environment,
                temp_dir=folder / name,
                outlives=True,
            )
            others.append(node)
            state = remember(name, node)
        _wait_for_all(state, [head, *others])
    return state


def _wait_for_all(state: ClusterState, started: Sequence[NodeProcess]) -> None:
    """Wait until Ray lists every node. Raises ClusterError."""
    deadline = time.monotonic() + node_process.START_TIMEOUT_S
    while True:
        found = now(state)
        if found.is_up:
            return
        late = [pair for pair in zip(found.nodes, started, strict=True) if pair[0].state != "up"]
        for node, process in late:
            process.check(f"node {node.name} of {state.name}", "every node should join the cluster")
        if time.monotonic() > deadline:
            node, process = late[0]
            raise process.failed(
                f"node {node.name} of {state.name}",
                f"it should join the cluster within {node_process.START_TIMEOUT_S:.0f} s",
            )
        time.sleep(0.3)


def _check(*, num_nodes: int, cpus: int | None, port: int | None) -> None:
    if num_nodes < 1:
        raise UsageError("--nodes", num_nodes, "a cluster needs at least 1 node, its head")
    if cpus is not None and cpus < 1:
        raise UsageError("--cpus", cpus, "each node must offer at least 1 CPU", "it may exceed the machine's CPUs")
    if port is None:
        return
    if not 1024 <= port <= 65535:
        raise UsageError("--port", port, "it must be between 1024 and 65535", "omit it to use a free one")
    try:
        socket.create_server((loopback.ADDRESS, port)).close()
    except OSError as exc:
        raise UsageError.problem(
            "--port", f"{port} cannot be used: {exc.strerror}", "omit it to use a free one"
        ) from exc


def _forget_if_gone(name: str) -> None:
    """Remove the record of a cluster without running processes, as after a reboot."""
    state = local_state.load(name)
    if state is not None and state.nodes and not state.left():
        state.end()


def _gpus(num_nodes: int) -> list[dict[str, str]]:
    """Environment variables that limit each node to its share of the GPUs; otherwise each would offer all of them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        with contextlib.suppress(OSError):
            given = ",".join(map(str, range(len(list(GPUS_OF_LINUX.iterdir())))))
    devices = [word.strip() for word in (given or "").split(",") if word.strip()]
    if num_nodes == 1 or not devices:
        return [{}] * num_nodes
    return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares_of(devices, num_nodes)]


def _nodes_of_ray(dashboard: str) -> list[dict[str, Any]]:
    """The head's list of its nodes; empty if it does not answer. Raises ClusterError if it rejects the token."""
    address = f"{dashboard}/api/v0/nodes?limit=10000&detail=1"
    try:
        found = json.loads(fetch(address, timeout_s=ANSWER_S, headers=headers()))
        return list(found["data"]["result"]["result"])
    except HttpError as exc:
        if exc.status in (401, 403):
            raise ClusterError.problem(
                "The token",
                f"was rejected by {dashboard}, which was started with a different token",
                "use the same RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or home directory as when it was started",
            ) from exc
        return []
    except (ValueError, KeyError, TypeError):
        return []
