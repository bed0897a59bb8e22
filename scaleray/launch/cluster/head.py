"""A Ray head of one's own on this machine: own ports, own folder, loopback only, gone with whoever started it.

For demos, benchmarks and tests that need a cluster to submit jobs to. It never touches another Ray on the machine,
as `ray stop` would.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from scaleray.errors import ClusterError
from scaleray.guarded import guarded
from scaleray.launch.cluster import loopback
from scaleray.launch.cluster.connection import DRIVER_ENVIRONMENT, OWN_ENVIRONMENT, set_auth_mode
from scaleray.launch.cluster.lean_node import NOT_PRESTARTED, nodes
from scaleray.launch.cluster.own_ray import free_port
from scaleray.launch.cluster.token import ensure_token
from scaleray.launch.cluster.worker_template import WorkerTemplate, is_possible, short_folder

START_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Head:
    """A running head. address: the cluster's address, for RAY_ADDRESS. dashboard: URL to submit jobs to."""

    address: str
    dashboard: str
    log: Path
    pid: int

    def environment(self) -> dict[str, str]:
        """Environment of a client of this head, such as `ray job submit`."""
        return {**os.environ, "RAY_ADDRESS": self.dashboard, loopback.VARIABLE: "0", "PATH": _path()}


@contextlib.contextmanager
def local_head(
    *, num_cpus: int, object_store_bytes: int = 512 * 2**20, environment: Mapping[str, str] | None = None
) -> Iterator[Head]:
    """Start a head and stop it, with everything it started, at the end of the context. Raises ClusterError.

    num_cpus: CPUs that Ray may hand out, which may be more than the machine has. Token authentication is as Ray sets
    it up: a token file in the user's home, made if there is none.
    """
    set_auth_mode()
    ensure_token()
    folder = short_folder()  # Ray's sockets are deep below it
    port, dashboard_port = free_port(), free_port()
    command = [
        sys.executable,
        "-m",
        __name__,
        str(folder),
        "start",
        "--head",
        "--block",
        "--disable-usage-stats",
        "--node-ip-address=127.0.0.1",
        f"--port={port}",
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={dashboard_port}",
        f"--ray-client-server-port={free_port()}",
        f"--dashboard-agent-listen-port={free_port()}",
        f"--dashboard-agent-grpc-port={free_port()}",
        f"--runtime-env-agent-port={free_port()}",
        f"--metrics-export-port={free_port()}",
        "--min-worker-port=0",
        "--max-worker-port=0",
        f"--num-cpus={num_cpus}",
        f"--object-store-memory={object_store_bytes}",
        f"--temp-dir={folder}/ray",
    ]
    of_ray = {**DRIVER_ENVIRONMENT, **OWN_ENVIRONMENT, **NOT_PRESTARTED}
    of_head = {**os.environ, **of_ray, **(environment or {}), "PATH": _path()}
    # fixed by default: two heads on one machine would collide
    of_head |= {"AUTOSCALER_METRIC_PORT": str(free_port()), "DASHBOARD_METRIC_PORT": str(free_port())}
    of_head.pop("RAY_ADDRESS", None)
    log = folder / "head.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            guarded(command),
            env=of_head,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{dashboard_port}"
        _wait_until_ready(process, url, log)
        yield Head(f"127.0.0.1:{port}", url, log, process.pid)
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _path() -> str:
    """PATH with this interpreter first: job entrypoints say `python`, and the environment may not be activated."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            urllib.request.urlopen(f"{url}/api/version", timeout=2).close()
            return
        except urllib.error.HTTPError:  # it answers, and wants its token
            return
        except OSError:
            time.sleep(0.3)
    lines = log.read_text(errors="replace").strip().splitlines()[-5:]
    raise ClusterError(
        "the local Ray head",
        "not running",
        f"it should answer at {url}",
        "last lines of its log:\n  " + "\n  ".join(lines),
    )


def main() -> None:
    """Ray's own command line, whose nodes have forks for workers, after a folder for the template of these."""
    folder = Path(sys.argv.pop(1))
    template = WorkerTemplate(folder=folder) if is_possible() else None  # first, as it takes longest
    from ray.scripts import scripts

    with nodes(template=template, has_dashboard=True, has_autoscaler=True), loopback.staying_local():
        scripts.main()


if __name__ == "__main__":
    main()
