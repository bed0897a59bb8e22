"""The Ray that a command starts for itself: its processes, and how its workers start.

Ray's own scripts would set a job environment in each worker, for 0.4 CPU seconds; here workers inherit it from the
raylet."""

import contextlib
import logging
import math
import os
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from scaleray.common.own_folder import own_folder, plain_executable
from scaleray.common.private_parts import EARLY_WORKERS, FORKED_WORKERS
from scaleray.config import RunConfig
from scaleray.launch.cluster import driver_guard, lean_node, loopback, worker_template
from scaleray.launch.cluster.token import ensure_token

_template: worker_template.WorkerTemplate | None = None
"""Template from which the workers of this process's own Ray are forked."""
_session: str | None = None
"""Ray's folder of the session started by this process."""
OF_A_WORKER = ["scaleray.training.worker"]
"""Modules that every worker of a training imports."""
WITHOUT_DASHBOARD = {
    # what only a dashboard or a metrics agent would read: a fifth of the CPU time of Ray's processes while it trains
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_gcs_pull_resource_loads_period_milliseconds": "10000",
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
}
"""Environment variables of a Ray without a dashboard; the user's own values take precedence."""
UNUSED_S = 60
"""Seconds before an idle worker is ended."""
PRESTART, PRESTART_TIMEOUT_S = "/ray.rpc.NodeManagerService/PrestartWorkers", 5.0
KEPT_S = 7 * 86400.0
"""Minimum seconds that logs of a failed session are kept."""


def start(config: RunConfig, environment: Mapping[str, str]) -> None:
    """Start Ray on this machine and connect to it. environment: variables of all its processes."""
    global _session
    ensure_token()
    has_dashboard = config.scale.dashboard
    if not has_dashboard:
        environment = {**environment, **{k: os.environ.get(k, v) for k, v in WITHOUT_DASHBOARD.items()}}
    known = {}
    if worker_template.is_possible():
        # workers end with this process; their raylet, which does not run yet, ends with it too
        first = {worker_template.JOB: worker_template.FIRST_JOB, worker_template.RAYLET: str(os.getpid())}
        with lean_node.variables(environment):  # before Ray is imported here, as it takes longest
            known["folder"] = _start_template(config, first, OF_A_WORKER)
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
    cores, spares = psutil.cpu_count() or 1, math.ceil(config.recovery.spares * config.scale.cpus_per_worker)
    node = lean_node.nodes(template=_template, has_dashboard=has_dashboard, has_autoscaler=False)
    interpreter = mock.patch.object(sys, "executable", plain_executable())  # Ray's processes are started with it
    with lean_node.variables(during_start), node, loopback.staying_local(), interpreter:
        ray.init(
            address="local",
            # input tasks must never wait for training to end, and spares take no time until they replace a worker
            num_cpus=cores + int(config.data.reserved_cpus) + spares,
            include_dashboard=has_dashboard,
            logging_level=logging.ERROR,
            _temp_dir=ray_folder(),
        )
    _session = lean_node.session_folder()
    driver_guard.note_ray(**known, logs=f"{_session or ray_folder()}/logs", processes=lean_node.processes())


def _start_template(config: RunConfig, variables: Mapping[str, str] | None = None, modules: Sequence[str] = ()) -> str:
    """Start the template of this process's workers and return its folder; see `WorkerTemplate`."""
    global _template
    folder = worker_template.short_folder()
    driver_guard.note_ray(folder=str(folder))
    threads = int(config.scale.cpus_per_worker)
    _template = worker_template.WorkerTemplate(folder=folder, threads=threads, variables=variables, modules=modules)
    return str(folder)


@contextlib.contextmanager
def forking_on(address: str, config: RunConfig) -> Iterator[Callable[[int], dict[str, Any]]]:
    """Context for connecting this process to the cluster at this address. If one of its nodes is on this machine, that
    node's template prepares the workers of this job; a node without a template gets one from this process.

    Yields a function that takes the cluster's number of nodes and returns the job's environment that makes workers
    forks of that template; it is empty if they are forks anyway, or cannot be."""
    raylet = worker_template.raylet_here(address) if worker_template.is_possible() else None
    place = None if raylet is None else worker_template.socket_of(raylet)
    # a node that joins later may have neither the file nor the socket
    if raylet is not None and place is None and not config.scale.is_elastic and not config.scale.wait_for_nodes_s:
        _start_template(config)

    def environment(num_nodes: int) -> dict[str, Any]:
        if _template is None or num_nodes != 1 or not FORKED_WORKERS.is_used():
            _end_template()
            return {}
        executable = shlex.join([sys.executable, str(worker_template.SCRIPT)])
        return {"py_executable": executable, "env_vars": {worker_template.SOCKET: str(_template.socket)}}

    yield environment
    if place is None and _template is not None:
        place = str(_template.socket)
    if place is not None:
        import ray

        job = {worker_template.JOB: ray.get_runtime_context().get_job_id(), worker_template.RAYLET: str(raylet)}
        worker_template.expect(place, job, modules=OF_A_WORKER)


def request_workers(config: RunConfig) -> None:
    """Make the node of this process start a run's processes before they are needed; unused ones end after a while, or
    with the job."""
    if not EARLY_WORKERS.is_used():
        return
    import ray
    from ray._private.grpc_utils import init_grpc_channel
    from ray._private.ray_constants import GLOBAL_GRPC_OPTIONS
    from ray.core.generated.common_pb2 import Language
    from ray.core.generated.node_manager_pb2 import PrestartWorkersRequest
    from ray.core.generated.runtime_environment_pb2 import RuntimeEnvInfo

    context = ray.get_runtime_context()
    here = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    room = int(here["Resources"].get("CPU", 0) / config.scale.cpus_per_worker)
    request = PrestartWorkersRequest(
        language=Language.PYTHON,
        job_id=bytes.fromhex(context.get_job_id()),
        runtime_env_info=RuntimeEnvInfo(serialized_runtime_env=context.get_runtime_env_string()),
        keep_alive_duration_secs=UNUSED_S,
        num_workers=min(config.scale.min_workers + config.recovery.spares, room)
        + 2,  # and those of the recorder and the controller
    )
    channel = init_grpc_channel(f"{here['NodeManagerAddress']}:{here['NodeManagerPort']}", options=GLOBAL_GRPC_OPTIONS)
    with contextlib.suppress(Exception), contextlib.closing(channel):  # without them, workers start as always
        channel.unary_unary(PRESTART)(request.SerializeToString(), timeout=PRESTART_TIMEOUT_S)


def _end_template() -> None:
    global _template
    if _template is not None:
        _template.close()
        _template = None
        driver_guard.note_ray()


def stop(*, keeps_logs: bool = False) -> None:
    """Stop the Ray that `start` started. keeps_logs: keep Ray's folder of this session for diagnosis."""
    import ray

    global _session
    ray.shutdown()
    if _session is not None and "RAY_TMPDIR" not in os.environ:
        if not keeps_logs:
            shutil.rmtree(_session, ignore_errors=True)
        _remove_old_sessions(Path(_session).parent)
    _session = None
    _end_template()
    driver_guard.note_ray()


def _remove_old_sessions(parent: Path) -> None:
    """Remove folders of sessions that ended long ago, and the link to a removed session."""
    for folder in parent.glob("session_2*"):
        with contextlib.suppress(OSError, ValueError):
            is_old = time.time() - folder.stat().st_mtime > KEPT_S
            if is_old and not psutil.pid_exists(int(folder.name.rpartition("_")[2])):
                shutil.rmtree(folder, ignore_errors=True)
    latest = parent / "session_latest"
    if latest.is_symlink() and not latest.exists():
        latest.unlink(missing_ok=True)


def ray_folder() -> str:
    """Folder of Ray's sockets, logs and packages. Ray makes it writable for all users, so it is inside this user's
    private folder; RAY_TMPDIR takes precedence."""
    parent = os.environ.get("RAY_TMPDIR")
    return f"{parent}/ray" if parent else f"{own_folder()}/ray"


def free_port() -> int:
    """A free TCP port."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
