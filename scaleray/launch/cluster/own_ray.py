"""The Ray that a command starts for itself: which of Ray's processes it has, and how its workers start.

An environment of its job costs each worker 0.4 CPU seconds where Ray's own scripts set it; here the raylet has it, and
its workers inherit it.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

import psutil

from scaleray.config import RunConfig
from scaleray.launch.cluster import lean_node, worker_template

_template: worker_template.WorkerTemplate | None = None
"""What the workers of this process's own Ray are forked from."""


def start(config: RunConfig, environment: Mapping[str, str]) -> None:
    """Start Ray on this machine and connect to it. environment: variables of all its processes."""
    global _template
    if worker_template.is_possible():
        with lean_node.variables(environment):  # before Ray is imported here, as it takes longest
            _template = worker_template.WorkerTemplate(
                folder=worker_template.short_folder(),
                threads=int(config.scale.cpus_per_worker),
                # workers end with this process; their raylet, which does not run yet, ends with it too
                variables={worker_template.JOB: worker_template.FIRST_JOB, worker_template.RAYLET: str(os.getpid())},
                modules=["scaleray.training.worker"],
            )
    import ray

    # Ray Train's cleaner looks for "the" cluster of this machine. Without its address, a second cluster started
    # here makes it destroy a healthy run; so the port is fixed beforehand and the address handed to every process.
    port = free_port()
    during_start = {
        **environment,
        "RAY_ADDRESS": f"{ray.util.get_node_ip_address()}:{port}",
        "RAY_GCS_SERVER_PORT": str(port),
        **lean_node.NOT_PRESTARTED,
    }
    cores = psutil.cpu_count() or 1
    has_dashboard = config.scale.dashboard
    node = lean_node.nodes(template=_template, has_dashboard=has_dashboard, has_autoscaler=False)
    with lean_node.variables(during_start), node:
        ray.init(
            address="local",
            # input tasks are counted beside the cores: they are light, and must never wait for training to end
            num_cpus=cores + int(config.data.reserved_cpus),
            include_dashboard=has_dashboard,
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
