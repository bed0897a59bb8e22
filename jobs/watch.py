"""A training that is watched: Ray, a run with its metrics, Prometheus and Alertmanager on this machine, until Ctrl-C.

Run by `make watch`. Prometheus and Alertmanager are those of the machine (Debian's packages have them); both listen on
127.0.0.1 alone. What all of it writes lies below .demo/watch, and everything ends with this program.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from scaleray.common.guarded import ending_like_ctrl_c, guarded
from scaleray.common.metric_names import SAMPLES_PER_S
from scaleray.errors import ClusterError, ScaleRayError, UsageError
from scaleray.launch.cluster.head import Head, local_head
from scaleray.launch.cluster.own_ray import free_port
from scaleray.live.dashboards.dashboard_files import config
from scaleray.live.dashboards.queries import once
from scaleray.live.grafana.written_dashboards import write_dashboards

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".demo" / "watch"
CPUS = 3  # two workers, and one for the input tasks
START_TIMEOUT_S = 60.0
HOST = "127.0.0.1"
TRAINING = (
    "train", "-c", "jobs/digits.yaml", "--scale.workers", "2", "--stop.after", "20000 epochs",
    "--evaluation.every", "100 epochs", "--checkpoint.every-minutes", "1", "--tracking.experiment", "watch",
)  # fmt: skip


@dataclass(frozen=True)
class Program:
    """A program of the machine. names: what packages call it. variable: of the environment, for one elsewhere. port: where
    it usually listens."""

    title: str
    names: tuple[str, ...]
    variable: str
    port: int


PROMETHEUS = Program("Prometheus", ("prometheus",), "PROMETHEUS", 9090)
ALERTMANAGER = Program("Alertmanager", ("prometheus-alertmanager", "alertmanager"), "ALERTMANAGER", 9093)
HOW_TO_INSTALL = (
    "Debian, Ubuntu: apt-get install prometheus prometheus-alertmanager; macOS: brew install prometheus alertmanager; "
    "or put the path of one from prometheus.io/download into "
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Start everything, say where it is, and wait; 0 where it was ended by Ctrl-C or --seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, help="end by itself after so long; else Ctrl-C does")
    seconds = parser.parse_args(arguments).seconds
    try:
        programs = found(PROMETHEUS), found(ALERTMANAGER)
        FOLDER.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(ending_like_ctrl_c())
            _wait(_start(stack, *programs), seconds)
    except ScaleRayError as exc:
        print(f"{type(exc).__name__}: {exc}", file=sys.stderr)
        return exc.exit_code
    except KeyboardInterrupt:
        pass
    print("ended, with everything that was started here")
    return 0


def found(program: Program) -> str:
    """The path of a program. Raises UsageError that says how to install it."""
    given = os.environ.get(program.variable)
    path = shutil.which(given) if given else next(filter(None, map(shutil.which, program.names)), None)
    if path is None:
        names = " or ".join(program.names)
        want = f"{given} cannot be run" if given else f"{names} is not on the PATH"
        raise UsageError(program.title, "not found" if given else None, want, HOW_TO_INSTALL + program.variable)
    return path


def _start(stack: contextlib.ExitStack, prometheus_path: str, alertmanager_path: str) -> subprocess.Popen[bytes]:
    """Everything, each with its end in the stack; gives the training."""
    print("starting a Ray head of its own, Prometheus and Alertmanager on this machine ...", flush=True)
    write_dashboards(FOLDER)
    head = stack.enter_context(local_head(num_cpus=CPUS))
    port = stack.enter_context(heard_alerts())
    alerts = stack.enter_context(alertmanager(alertmanager_path, FOLDER, webhook=f"http://{HOST}:{port}/"))
    address = stack.enter_context(
        prometheus(
            prometheus_path,
            FOLDER,
            ray_targets=[str(service_discovery(head))],
            alertmanagers=[alerts.removeprefix("http://")],
            rules=[str(FOLDER / "alerts.yaml")],
        )
    )
    graph = once(SAMPLES_PER_S).replace("$job", ".+").replace("$instance", ".+").replace("$run_id", ".*")
    shown = urllib.parse.urlencode({"g0.expr": graph.replace("$run", ".*"), "g0.tab": 0, "g0.range_input": "10m"})
    pages = f"{address}{_pages(address)}"
    print(
        f"Prometheus    {address}{_instead_of(PROMETHEUS, address)}  targets: {pages}/targets  rules: {pages}/rules  alerts: {pages}/alerts"
    )
    print(f"Alertmanager  {alerts}{_instead_of(ALERTMANAGER, alerts)}  alerts are shown below as well")
    print(f"throughput    {address}/graph?{shown}")
    print(f"dashboards    scaleray dashboards install --grafana URL, with {address} as data source", flush=True)
    return stack.enter_context(training(head, FOLDER))


def service_discovery(head: Head) -> Path:
    """The file in which a head tells Prometheus of its nodes."""
    return head.log.parent / "ray" / "prom_metrics_service_discovery.json"


@contextlib.contextmanager
def training(head: Head | None, folder: Path, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """A run on the head's cluster, or without Ray, whose output comes through. more: options after the usual ones."""
    name = time.strftime("watched-%Y%m%d-%H%M%S") + ("" if head else "-local")
    words = (*TRAINING, "--tracking.run-name", name, *(() if head else ("--local",)), *more)
    with command(words, folder, head=head) as process:
        yield process


@contextlib.contextmanager
def command(words: Sequence[str], folder: Path, *, head: Head | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A command of scaleray whose runs lie in `folder`, on the head's cluster where there is one."""
    places = ("--tracking.uri", f"sqlite:///{folder / 'mlflow.db'}", "--checkpoint.storage-path", str(folder / "runs"))
    environment = {**head.environment(), "RAY_ADDRESS": head.address} if head else None
    with _running([sys.executable, "-m", "scaleray", *words, *places], env=environment, cwd=ROOT) as process:
        yield process


@contextlib.contextmanager
def prometheus(
    path: str, folder: Path, *, interval: str = "5s", port: int = PROMETHEUS.port, **targets: Any
) -> Iterator[str]:
    """A Prometheus with data of its own in `folder`; gives its address. targets: see `scraping.config`."""
    file, address = folder / "watch_prometheus.yml", f"{HOST}:{_port(port)}"
    file.write_text(yaml.safe_dump(config(interval=interval, **targets), sort_keys=False))
    shutil.rmtree(folder / "prometheus", ignore_errors=True)  # of an earlier one, with its runs
    command = [
        path,
        f"--config.file={file}",
        f"--storage.tsdb.path={folder / 'prometheus'}",
        f"--web.listen-address={address}",
        "--log.level=warn",
    ]
    with _serving(command, f"http://{address}", folder / "prometheus.log", PROMETHEUS.title):
        yield f"http://{address}"


@contextlib.contextmanager
def alertmanager(path: str, folder: Path, *, webhook: str, port: int = ALERTMANAGER.port) -> Iterator[str]:
    """An Alertmanager that sends everything to a webhook; gives its address."""
    file, address = folder / "alertmanager.yml", f"{HOST}:{_port(port)}"
    route = {"receiver": "here", "group_by": ["alertname", "ray_train_run_name"], "group_wait": "1s"}
    receiver = {"name": "here", "webhook_configs": [{"url": webhook, "send_resolved": True}]}
    file.write_text(yaml.safe_dump({"route": route, "receivers": [receiver]}, sort_keys=False))
    command = [
        path,
        f"--config.file={file}",
        f"--storage.path={folder / 'alertmanager'}",
        f"--web.listen-address={address}",
        "--cluster.listen-address=",  # alone, or it would listen for others
        "--log.level=warn",
    ]
    with _serving(command, f"http://{address}", folder / "alertmanager.log", ALERTMANAGER.title):
        yield f"http://{address}"


@contextlib.contextmanager
def heard_alerts() -> Iterator[int]:
    """A webhook that prints alerts as they come; gives its port."""
    server = ThreadingHTTPServer((HOST, 0), _Webhook)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


class _Webhook(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        for alert in body.get("alerts", ()):
            labels, words = alert.get("labels", {}), alert.get("annotations", {})
            print(
                f"ALERT {alert.get('status')}: {labels.get('severity')} {labels.get('alertname')}: "
                f"{words.get('summary', '')}. {words.get('what_to_do', '')}",
                flush=True,
            )
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Say nothing: what came is printed above."""


@contextlib.contextmanager
def _serving(command: Sequence[str], address: str, log: Path, title: str) -> Iterator[None]:
    """A server that is ready, until the end of the context. Raises ClusterError with its last lines."""
    with open(log, "wb") as output, _running(command, stdout=output, stderr=subprocess.STDOUT) as process:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _is_ready(address):
            if process.poll() is not None or time.monotonic() > deadline:
                lines = log.read_text(errors="replace").strip().splitlines()[-5:]
                hint = "last lines of its log:\n  " + "\n  ".join(lines)
                raise ClusterError(title, "not running", f"it should answer at {address}", hint)
            time.sleep(0.1)
        yield


@contextlib.contextmanager
def _running(command: Sequence[str], **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends, with all it starts, at the end of the context or of this program."""
    process = subprocess.Popen(guarded(command), stdin=subprocess.DEVNULL, **more)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/-/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _pages(address: str) -> str:
    """Where a Prometheus has its pages: Debian's package has those of older versions, below a folder."""
    try:
        urllib.request.urlopen(f"{address}/targets", timeout=10).close()
    except urllib.error.HTTPError:
        return "/classic"
    return ""


def ask(address: str, path: str, parameters: Mapping[str, Any] | None = None) -> Any:
    """What Prometheus' HTTP API gives as `data`."""
    query = urllib.parse.urlencode(parameters or {}, doseq=True)
    with urllib.request.urlopen(f"{address}/api/v1/{path}?{query}", timeout=30) as answer:
        return json.loads(answer.read())["data"]


def _instead_of(program: Program, address: str) -> str:
    """What is said where a program does not listen where it usually does."""
    return "" if address.endswith(f":{program.port}") else f" ({program.port} is in use)"


def _port(usual: int) -> int:
    """The usual port of a program, or a free one where another program has it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, usual))
        except OSError:
            return free_port()
    return usual


def _wait(run: subprocess.Popen[bytes], seconds: float | None) -> None:
    """Until so long is over; without a time until Ctrl-C, also where the training has ended."""
    deadline = None if seconds is None else time.monotonic() + seconds
    has_ended = False
    while deadline is None or time.monotonic() < deadline:
        if not has_ended and run.poll() is not None:
            has_ended = True
            how = f"failed with exit code {run.returncode}, see above" if run.returncode else "ended"
            print(f"the training has {how}; Prometheus has its course until Ctrl-C", flush=True)
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
