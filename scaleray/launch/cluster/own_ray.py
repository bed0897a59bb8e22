"""The Ray that a command starts for itself: which of Ray's processes it has, and how its workers start. The one place
that overrides private methods of Ray's node; where those are missing, Ray starts as it always does.

CPU seconds before the first step, on 2 cores: the autoscaler's monitor 0.4; the dashboard's process, which starts, and
is waited for, even where no dashboard is wanted, 0.7; the node's agent 0.8, which has a minimal form for installations
without the dashboard's libraries. An environment of its job costs each worker 0.4, for a process that imports Ray
only to set it; here the raylet has it, and its workers inherit it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from typing import Any

import psutil

from scaleray.config import RunConfig
from scaleray.launch.cluster import worker_template

_template: worker_template.WorkerTemplate | None = None
"""What the workers of this process's own Ray are forked from."""


def start(config: RunConfig, environment: Mapping[str, str]) -> None:
    """Start Ray on this machine and connect to it. environment: variables of all its processes."""
    global _template
    if worker_template.is_possible():
        with _variables(environment):  # before Ray is imported here, as it takes longest
            _template = worker_template.WorkerTemplate(threads=int(config.scale.cpus_per_worker))
    import ray

    # Ray Train's cleaner looks for "the" cluster of this machine. Without its address, a second cluster started
    # here makes it destroy a healthy run; so the port is fixed beforehand and the address handed to every process.
    port = free_port()
    during_start = {
        **environment,
        "RAY_ADDRESS": f"{ray.util.get_node_ip_address()}:{port}",
        "RAY_GCS_SERVER_PORT": str(port),
        # idle workers that nobody asked for yet would take the cores from what everybody waits for
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
    }
    cores = psutil.cpu_count() or 1
    with _variables(during_start), _lean_node(has_dashboard=config.scale.dashboard):
        ray.init(
            address="local",
            # input tasks are counted beside the cores: they are light, and must never wait for training to end
            num_cpus=cores + int(config.data.reserved_cpus),
            include_dashboard=config.scale.dashboard,
            logging_level=logging.ERROR,
        )


def stop() -> None:
    """End what `start` started."""
    import ray

    global _template
    ray.shutdown()
    if _template is not None:
        _template.close()
        _template = None


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for as long as the context lasts."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _lean_node(*, has_dashboard: bool) -> Iterator[None]:
    """Let `ray.init` start a node without the processes that nobody uses, and with workers made by the template."""
    import ray._private.node as node
    import ray._private.utils as utils

    overridden = ("start_monitor", "start_api_server", "start_raylet")
    if not all(hasattr(node.Node, name) for name in overridden) or not hasattr(utils, "get_dashboard_dependency_error"):
        yield
        return

    class LeanNode(node.Node):
        def start_monitor(self) -> None:
            """No autoscaler: this machine is all there is."""

        def start_api_server(self, **arguments: Any) -> None:
            if has_dashboard:
                super().start_api_server(**arguments)

        def start_raylet(self, *arguments: Any) -> None:
            if _template is not None:
                os.environ[worker_template.ORIGINAL] = self._ray_params.worker_path
                self._ray_params.worker_path = str(worker_template.SCRIPT)
            super().start_raylet(*arguments)

    before = node.Node, utils.get_dashboard_dependency_error
    node.Node = LeanNode
    if not has_dashboard:  # the agent is in its minimal form where the dashboard's libraries are not installed
        utils.get_dashboard_dependency_error = lambda: ImportError("not asked for")
    names = {worker_template.SOCKET: str(_template.socket), worker_template.ORIGINAL: ""} if _template else {}
    try:
        with _variables(names):
            yield
    finally:
        node.Node, utils.get_dashboard_dependency_error = before
