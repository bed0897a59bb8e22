"""A temporary Ray head on this machine, with its own ports and folder, reachable only on loopback. It ends with the
process that started it.

For demos, benchmarks and tests that need a cluster to submit jobs to."""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from scaleray.launch.cluster import loopback, node_process
from scaleray.launch.cluster.connection import set_auth_mode
from scaleray.launch.cluster.local_state import GRACE_S
from scaleray.launch.cluster.own_ray import free_port
from scaleray.launch.cluster.token import ensure_token
from scaleray.launch.cluster.worker_template import short_folder


@dataclass(frozen=True)
class Head:
    """A running head. address: the cluster's address, for RAY_ADDRESS. dashboard: URL to submit jobs to."""

    address: str
    dashboard: str
    log: Path
    pid: int

    def environment(self) -> dict[str, str]:
        """Environment of a client of this head, such as `ray job submit`."""
        return {**os.environ, "RAY_ADDRESS": self.dashboard, loopback.VARIABLE: "0", "PATH": node_process.path()}


@contextlib.contextmanager
def local_head(
    *,
    num_cpus: int,
    object_store_bytes: int = node_process.OBJECT_STORE_BYTES,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Head]:
    """Start a head and stop it, with everything it started, at the end of the context. Raises ClusterError.

    num_cpus: CPUs that Ray may hand out, which may be more than the machine has. Token authentication works as in Ray,
    with a token file in the user's home, created if missing."""
    set_auth_mode("local")
    ensure_token()
    folder = short_folder()  # Ray's sockets are deep below it
    port, dashboard_port = free_port(), free_port()
    node = node_process.start_head(
        folder,
        port=port,
        dashboard_port=dashboard_port,
        num_cpus=num_cpus,
        environment=environment or {},
        temp_dir=folder / "ray",
        object_store_bytes=object_store_bytes,
    )
    try:
        url = f"http://127.0.0.1:{dashboard_port}"
        node_process.wait_for_head(node, url)
        yield Head(f"127.0.0.1:{port}", url, node.log, node.process.pid)
    finally:
        node.process.terminate()
        try:
            node.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(node.process.pid, signal.SIGKILL)
            node.process.wait()
        shutil.rmtree(folder, ignore_errors=True)
