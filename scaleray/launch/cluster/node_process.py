"""Start a Ray node on this machine with Ray's own command line, on loopback and with its own ports.

All heads are started here, for permanent clusters (`local_clusters.py`) and temporary ones (`head.py`). Unlike `ray
stop`, it never touches another Ray on the machine."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scaleray.common.guarded import guarded
from scaleray.common.http_client import HttpError, fetch
from scaleray.common.own_folder import keep_compiled_code_here, plain_executable
from scaleray.errors import ClusterError
from scaleray.launch.cluster import loopback
from scaleray.launch.cluster.connection import DRIVER_ENVIRONMENT, OWN_ENVIRONMENT
from scaleray.launch.cluster.lean_node import NOT_PRESTARTED, nodes
from scaleray.launch.cluster.own_ray import free_port
from scaleray.launch.cluster.worker_template import WorkerTemplate, is_possible

START_TIMEOUT_S = 300.0
"""Seconds to wait for a start: a loaded machine has needed more than two minutes."""
OBJECT_STORE_BYTES = 512 * 2**20
OPEN_FILES = 65536
JOINED = b"Ray runtime started"
"""Line that `ray start` prints once the node has joined its cluster, on a loaded machine long after its dashboard
answers."""


@dataclass(frozen=True)
class NodeProcess:
    """A node that was started. log: its output."""

    process: subprocess.Popen[bytes]
    log: Path

    def check(self, what: str, wanted: str) -> None:
        """Raise ClusterError with the last lines of the log if the process has ended."""
        if self.process.poll() is not None:
            raise self.failed(what, wanted)

    def failed(self, what: str, wanted: str) -> ClusterError:
        """Error for a node that failed to start."""
        lines = self.log.read_text(errors="replace").strip().splitlines()[-5:]
        return ClusterError(what, "not running", wanted, "last lines of its log:\n  " + "\n  ".join(lines))


def start_head(
    folder: Path,
    *,
    port: int,
    dashboard_port: int,
    num_cpus: int,
    environment: Mapping[str, str],
    temp_dir: Path,
    object_store_bytes: int = OBJECT_STORE_BYTES,
    outlives: bool = False,
) -> NodeProcess:
    """Start a head, and with it a cluster. folder: a new folder for its log and its workers' template.

    environment: variables of its processes in addition to those of scaleray. temp_dir: Ray's folder; inside a private
    one, since Ray makes it writable for all users. outlives: whether the head continues after this process ends."""
    words = [
        "--head",
        "--dashboard-host=127.0.0.1",
        f"--port={port}",
        f"--dashboard-port={dashboard_port}",
        f"--ray-client-server-port={free_port()}",
    ]
    # fixed by default: two heads on one machine would collide
    ports = {"AUTOSCALER_METRIC_PORT": str(free_port()), "DASHBOARD_METRIC_PORT": str(free_port())}
    return _start(
        folder, [*words, f"--temp-dir={temp_dir}"], num_cpus, object_store_bytes, {**environment, **ports}, outlives
    )


def start_worker(
    folder: Path,
    address: str,
    *,
    name: str,
    num_cpus: int,
    environment: Mapping[str, str],
    temp_dir: Path,
    outlives: bool = False,
) -> NodeProcess:
    """Start another node of the cluster at this address of this machine; arguments as for `start_head`.

    temp_dir: of this node alone, since nodes that start concurrently in one folder may take each other's names."""
    words = [f"--address={address}", f"--node-name={name}", f"--temp-dir={temp_dir}"]
    return _start(folder, words, num_cpus, OBJECT_STORE_BYTES, environment, outlives)


def _start(
    folder: Path,
    words: Sequence[str],
    num_cpus: int,
    object_store_bytes: int,
    environment: Mapping[str, str],
    outlives: bool,
) -> NodeProcess:
    command = [
        plain_executable(),
        "-m",
        __name__,
        str(folder),
        "start",
        *words,
        "--block",
        "--disable-usage-stats",
        "--node-ip-address=127.0.0.1",
        f"--dashboard-agent-listen-port={free_port()}",
        f"--dashboard-agent-grpc-port={free_port()}",
        f"--runtime-env-agent-port={free_port()}",
        f"--metrics-export-port={free_port()}",
        "--min-worker-port=0",
        "--max-worker-port=0",
        f"--num-cpus={num_cpus}",
        f"--object-store-memory={object_store_bytes}",
    ]
    keep_compiled_code_here()
    of_node = {**os.environ, **DRIVER_ENVIRONMENT, **OWN_ENVIRONMENT, **NOT_PRESTARTED, **environment, "PATH": path()}
    of_node.pop("RAY_ADDRESS", None)
    log = folder / "log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            guarded(command, outlives=outlives),
            env=of_node,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    return NodeProcess(process, log)


def path() -> str:
    """PATH with this interpreter first, since job entrypoints call `python` and the environment may not be active."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def wait_for_head(node: NodeProcess, url: str) -> None:
    """Wait until the head's dashboard answers at this URL and its node has joined. Raises ClusterError."""
    what, wanted = "the local Ray head", f"it should answer at {url}"
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        node.check(what, wanted)
        if JOINED in node.log.read_bytes() and _answers(url):
            return
        time.sleep(0.3)
    raise node.failed(what, wanted)


def _answers(url: str) -> bool:
    try:
        fetch(f"{url}/api/version", timeout_s=2)
    except HttpError as exc:
        return exc.status is not None  # it answers, and requires its token
    return True


def main() -> None:
    """Run Ray's own command line with forked workers. First argument: folder for their template."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:  # a shell's 1,024 is too low for Ray; ray.init raises it, Ray's command line does not
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, OPEN_FILES)), hard))
    folder = Path(sys.argv.pop(1))
    template = WorkerTemplate(folder=folder) if is_possible() else None  # first, as it takes longest
    # Ray joins no cluster where its switch for machines without one is set; it looks for that while it is imported
    switch = os.environ.pop(loopback.VARIABLE, None)
    from ray.scripts import scripts

    if switch is not None:
        os.environ[loopback.VARIABLE] = switch
    with nodes(template=template, has_dashboard=True, has_autoscaler=True), loopback.staying_local():
        scripts.main()


if __name__ == "__main__":
    main()
