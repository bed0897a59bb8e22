"""A Ray node without unused processes. Its workers are forks of one process.

Overrides private methods of Ray's node, see `scaleray/common/private_parts.py`; if they are missing, Ray starts as
usual.

CPU seconds before the first step, on 2 cores: the autoscaler's monitor 0.4; the dashboard's process 0.7, which Ray
starts and waits for even without a dashboard; the node's agent 0.8, which has a minimal form for installations without
the dashboard's libraries."""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from scaleray.common.private_parts import FORKED_WORKERS, LEAN_NODE, PATIENT_START
from scaleray.launch.cluster import worker_template
from scaleray.launch.cluster.worker_template import WorkerTemplate

NOT_PRESTARTED = {"RAY_prestart_worker_first_driver": "0", "RAY_enable_worker_prestart": "0"}
"""Environment variables of a node. Idle workers started in advance would take cores from the start-up."""
START_TIMEOUT_S = 240.0
"""Seconds to wait until a node has joined its cluster. Ray waits 30 s, all of which a loaded machine has needed."""


@contextlib.contextmanager
def nodes(*, template: WorkerTemplate | None, has_dashboard: bool, has_autoscaler: bool) -> Iterator[None]:
    """Make Ray start nodes of this kind in this process. template: the process from which their workers are forked."""
    import ray._private.node as node
    import ray._private.services as services
    import ray._private.utils as utils

    started: list[Any] = []
    is_lean, is_patient = LEAN_NODE.is_used(), PATIENT_START.is_used()
    if template is not None and not FORKED_WORKERS.is_used():
        template = None

    class LeanNode(node.Node):
        def start_monitor(self) -> None:
            if has_autoscaler or not is_lean:
                super().start_monitor()

        def start_api_server(self, **arguments: Any) -> None:
            if has_dashboard or not is_lean:
                super().start_api_server(**arguments)

        def start_raylet(self, *arguments: Any, **named: Any) -> None:
            if template is not None:
                os.environ[worker_template.ORIGINAL] = self._ray_params.setup_worker_path
                self._ray_params.setup_worker_path = str(worker_template.SCRIPT)
            super().start_raylet(*arguments, **named)
            started.append(self)

    def get_node(*arguments: Any) -> Any:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                return find_node(*arguments)
            except RuntimeError:  # it has not joined yet
                raylets = [one.process for lean in started for one in lean.all_processes["raylet"]]
                if time.monotonic() > deadline or not raylets or any(one.poll() is not None for one in raylets):
                    raise
                time.sleep(0.1)

    find_node = services.get_node
    before = node.Node, utils.get_dashboard_dependency_error
    node.Node = LeanNode if is_lean or template is not None else node.Node
    if is_lean and not has_dashboard:  # without the dashboard's libraries, the agent is in its minimal form
        utils.get_dashboard_dependency_error = lambda: ImportError("not requested")
    if is_patient:
        services.get_node = get_node
    names = {worker_template.SOCKET: str(template.socket), worker_template.ORIGINAL: ""} if template else {}
    try:
        with variables(names):
            yield
    finally:
        node.Node, utils.get_dashboard_dependency_error = before
        services.get_node = find_node


def processes() -> dict[str, int]:
    """Ids of the raylet and the GCS of the node that this process has started, by name."""
    import ray._private.worker as worker

    known = getattr(getattr(worker, "_global_node", None), "all_processes", {})
    names = {"raylet": "the raylet", "gcs_server": "the GCS"}
    return {words: known[name][0].process.pid for name, words in names.items() if known.get(name)}


def session_folder() -> str | None:
    """The folder of logs and sockets of the node that this process has started."""
    import ray._private.worker as worker

    node = getattr(worker, "_global_node", None)
    return str(node.get_session_dir_path()) if node is not None and hasattr(node, "get_session_dir_path") else None


@contextlib.contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the duration of the context."""
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
