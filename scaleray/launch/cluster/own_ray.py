"""The Ray that a command starts for itself: its processes, and how its workers start.

A job environment set by Ray's own scripts costs each worker 0.4 CPU seconds; here the raylet has it, and its workers
inherit it."""

import contextlib
import logging
import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import psutil

from scaleray.common.own_folder import own_folder, plain_executable
from scaleray.config import RunConfig
from scaleray.launch.cluster import driver_guard, lean_node, loopback, worker_template
from scaleray.launch.cluster.token import ensure_token

_template: worker_template.WorkerTemplate | None = None
"""Template from which the workers of this process's own Ray are forked."""
_session: str | None = None
"""Ray's folder of the session started by this process."""
KEPT_S = 7 * 86400.0
"""Minimum seconds for which logs of a failed session are kept."""


def start(config: RunConfig, environment: Mapping[str, str]) -> None:
    """Start Ray on this machine and connect to it. environment: variables of all its processes."""
    global _template, _session
    ensure_token()
    known = {}
    if worker_template.is_possible():
        folder = worker_template.short_folder()
        known["folder"] = str(folder)
        driver_guard.note_ray(**known)
        with lean_node.variables(environment):  # before Ray is imported here, as it takes longest
            _template = worker_template.WorkerTemplate(
                folder=folder,
                threads=int(config.scale.cpus_per_worker),
                # workers end with this process; their raylet, which does not run yet, ends with it too
                variables={worker_template.JOB: worker_template.FIRST_JOB, worker_template.RAYLET: str(os.getpid())},
                modules=["scaleray.training.worker"],
            )
    import ray

    # Ray Train's cleaner looks for "the" cluster of this machine. Without its address, a second cluster started
    # here makes it destroy a healthy run; so the port is fixed beforehand and the address handed to every process.
    port = free_port()
    host = loopback.ADDRESS if loopback.is_kept() else ray.util.get_node_ip_address()
    during_start = {
        **environment,
        "RAY_ADDRESS": f"{host}:{port}",
        "RAY_GCS_SERVER_PORT": str(port),
        **lean_node.NOT_PRESTARTED,
    }
    cores = psutil.cpu_count() or 1
    has_dashboard = config.scale.dashboard
    node = lean_node.nodes(template=_template, has_dashboard=has_dashboard, has_autoscaler=False)
    interpreter = mock.patch.object(sys, "executable", plain_executable())  # Ray's processes are started with it
    with lean_node.variables(during_start), node, loopback.staying_local(), interpreter:
        ray.init(
            address="local",
            # input tasks are counted beside the cores: they are light, and must never wait for training to end
            num_cpus=cores + int(config.data.reserved_cpus),
            include_dashboard=has_dashboard,
            logging_level=logging.ERROR,
            _temp_dir=ray_folder(),
        )
    _session = lean_node.session_folder()
    driver_guard.note_ray(**known, logs=f"{_session or ray_folder()}/logs", processes=lean_node.processes())


def stop(*, keeps_logs: bool = False) -> None:
    """Stop the Ray that `start` started. keeps_logs: keep Ray's folder of this session for diagnosis."""
    import ray

    global _template, _session
    ray.shutdown()
    if _session is not None and "RAY_TMPDIR" not in os.environ:
        if not keeps_logs:
            shutil.rmtree(_session, ignore_errors=True)
        _remove_old_sessions(Path(_session).parent)
    _session = None
    if _template is not None:
        _template.close()
        _template = None
    driver_guard.note_ray()


def _remove_old_sessions(parent: Path) -> None:
    """Remove folders of sessions that ended long ago, and a link to a session whose folder is gone."""
    for folder in parent.glob("session_2*"):
        with contextlib.suppress(OSError, ValueError):
            is_old = time.time() - folder.stat().st_mtime > KEPT_S
            if is_old and not psutil.pid_exists(int(folder.name.rpartition("_")[2])):
                shutil.rmtree(folder, ignore_errors=True)
    latest = parent / "session_latest"
    if latest.is_symlink() and not latest.exists():
        latest.unlink(missing_ok=True)


def ray_folder() -> str:
    """Folder of Ray's sockets, logs and packages. Ray lets all users write to it, so it is inside a private folder of
    this user; RAY_TMPDIR takes precedence."""
    parent = os.environ.get("RAY_TMPDIR")
    return f"{parent}/ray" if parent else f"{own_folder()}/ray"


def free_port() -> int:
    """A free TCP port."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
