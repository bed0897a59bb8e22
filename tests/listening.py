"""The ports that a command listens at, and what somebody without a token gets there."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import psutil

MARK = "LISTENING_TEST"
"""Variable by which the processes of a command are known, however they were started."""
METHODS = (
    "/ray.rpc.InternalKVGcsService/InternalKVKeys",
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.JobInfoGcsService/GetAllJobInfo",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.NodeManagerService/RequestWorkerLease",
    "/ray.rpc.ObjectManagerService/Push",
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "/ray.rpc.CoreWorkerService/PushTask",
    "/ray.rpc.CoreWorkerService/KillActor",
    "/ray.rpc.ReporterService/GetTraceback",
    "/ray.rpc.events.EventAggregatorService/AddEvents",
    "/ray.rpc.RayletDriver/ClusterInfo",
    "/ray.rpc.RayletDriver/Schedule",
    "/ray.rpc.RayletDataStreamer/Datapath",
    "/ray.rpc.RayletLogStreamer/Logstream",
)
"""Calls of all servers that Ray has, those that run code among them."""
NOT_GRPC = ("UNAVAILABLE", "DEADLINE_EXCEEDED")
PATHS = ("/", "/api/jobs/", "/api/version", "/nodes?view=summary", "/api/v0/logs", "/metrics", "/ajax-api/2.0/mlflow/")
REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


@dataclass(frozen=True)
class Port:
    """A port that is listened at. address: without the spelling of IPv4 in IPv6."""

    address: str
    number: int
    process: str

    @property
    def is_on_loopback(self) -> bool:
        """Whether no other host reaches it."""
        return self.address.startswith("127.") or self.address == "::1"


@contextlib.contextmanager
def marked(command: list[str], environment: dict[str, str], **options) -> Iterator[tuple[subprocess.Popen, str]]:
    """A running command with the mark of its processes; ends it like Ctrl-C would, and all that it has left."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    process = subprocess.Popen(command, env={**environment, MARK: mark}, start_new_session=True, **options)
    try:
        yield process, mark
    finally:
        if process.poll() is None:
            process.send_signal(2)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=60)
        for one in processes(mark):
            with contextlib.suppress(psutil.Error):
                one.kill()
        process.wait()


def processes(mark: str) -> list[psutil.Process]:
    """Those of the command with this mark, and all below them: some of Ray's write their title over the mark."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                found |= {process, *process.children(recursive=True)}
    return [process for process in found if process.is_running()]


def ports(mark: str) -> list[Port]:
    """Where the processes with this mark listen now."""
    found = set()
    for process in processes(mark):
        with contextlib.suppress(psutil.Error):
            name = " ".join(process.cmdline())[:200] or process.name()
            for connection in process.net_connections(kind="inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add(Port(connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port, name))
    return sorted(found, key=lambda port: (port.address, port.number))


def answer(port: Port, token: str | None = None) -> dict[str, str]:
    """What a request without a token, or with this one, gets: a gRPC status by method, or an HTTP status by path;
    nothing where the port takes a connection and says no word."""
    host = port.address if port.address not in ("::", "0.0.0.0") else "127.0.0.1"
    header = {} if token is None else {"authorization": f"Bearer {token}"}
    if by_path := _http(host, port.number, header):
        return by_path
    with grpc.insecure_channel(f"{host}:{port.number}") as channel:
        if _grpc(channel, METHODS[0], header) in NOT_GRPC:
            return {}
        return {method: _grpc(channel, method, header) for method in METHODS}


def is_refused(statuses: dict[str, str]) -> bool:
    """Whether a gRPC server wants a token: it knows one of the methods, and answers none."""
    known = {status for status in statuses.values() if status != "UNIMPLEMENTED"}
    return known == {"UNAUTHENTICATED"}


def words(statuses: dict[str, str]) -> str:
    """What a port answers to somebody without a token."""
    if not statuses:
        return "nothing"  # gloo, torch's store, or gone before it was asked
    if is_refused(statuses) or set(statuses.values()) in ({"401"}, {"403"}):
        return "a token is wanted"
    if set(statuses.values()) <= {"UNIMPLEMENTED", "UNAUTHENTICATED", *NOT_GRPC}:
        return "too busy to answer"
    if {path: status for path, status in statuses.items() if status not in ("401", "403")} == {"/": "200"}:
        return "a page without data"  # of Ray's dashboard
    if set(statuses.values()) == {"501"}:
        return "a receiver of alerts"  # of `make watch`, which answers no question
    if set(statuses.values()) <= {"200", "404", "405"}:
        return "metrics or MLflow"  # which ask nobody, see SECURITY.md
    return f"something else: {statuses}"


def _grpc(channel: grpc.Channel, method: str, header: dict[str, str]) -> str:
    try:
        channel.unary_unary(method)(b"", timeout=2, metadata=list(header.items()))
    except grpc.RpcError as exc:
        return exc.code().name
    return "OK"


def _http(host: str, number: int, header: dict[str, str]) -> dict[str, str]:
    with contextlib.suppress(OSError), socket.create_connection((host, number), timeout=2) as connection:
        connection.sendall(REQUEST)
        if not connection.recv(5).startswith(b"HTTP/"):
            return {}
        return {path: status(f"http://{host}:{number}{path}", header) for path in PATHS}
    return {}


def status(url: str, header: dict[str, str]) -> str:
    """The HTTP status of a page for a request with this header."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=header), timeout=5) as answered:
            return str(answered.status)
    except urllib.error.HTTPError as exc:
        return str(exc.code)
    except OSError as exc:
        return type(exc).__name__
