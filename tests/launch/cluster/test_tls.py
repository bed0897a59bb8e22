"""Ray's own TLS between the nodes of a cluster, with a certificate authority of one's own, as SECURITY.md describes it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from listening import MARK, METHODS, REQUEST, Port, is_refused, ports, processes
from optional_programs import needs, program
from waiting import wait_until

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "SECURITY.md"
SCALERAY = [sys.executable, "-m", "scaleray"]
NODES = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"
"""A call that the control store knows, and every other server of Ray's refuses as unknown."""
FILES = {"root_certificates": "ca.crt", "private_key": "node.key", "certificate_chain": "node.crt"}
OF_PEERS = ("root_certificates",)
CALL_S = 3.0

pytestmark = needs("openssl")


def made(folder: Path) -> dict[str, str]:
    """The environment of a user who has run the commands of the page in this folder."""
    section = DOCUMENT.read_text().partition("## TLS between nodes")[2]
    commands = section.partition("```sh\n")[2].partition("```")[0]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SCALERAY_"))}
    environment |= {"HOME": str(folder), "PYTHONPATH": str(ROOT), "ADDRESSES": "IP:127.0.0.1"}
    shell = ["bash", "-euo", "pipefail", "-c", f"{commands}\nenv -0"]
    done = subprocess.run(shell, cwd=folder, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(line.split("=", 1) for line in done.stdout.decode().split("\0") if "=" in line)


def test_the_commands_of_the_page_make_certificates_that_only_their_user_can_read(tmp_path):
    environment = made(tmp_path)
    assert environment["RAY_USE_TLS"] == "1"
    files = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "tls").iterdir()}
    assert files.keys() >= {"ca.crt", "ca.key", "node.crt", "node.key"} and set(files.values()) == {0o600}
    check = [program("openssl"), "verify", "-CAfile", "ca.crt", "node.crt"]
    assert subprocess.run(check, cwd=tmp_path / "tls", capture_output=True).returncode == 0


def credentials(folder: Path, names=tuple(FILES)) -> grpc.ChannelCredentials:
    """What a client of gRPC shows of the files of a folder. names: which of them."""
    return grpc.ssl_channel_credentials(**{name: (folder / "tls" / FILES[name]).read_bytes() for name in names})


def mixed(ours: Path, others: Path) -> grpc.ChannelCredentials:
    """A client that trusts our authority and has a certificate of another one."""
    read = {name: (others / "tls" / FILES[name]).read_bytes() for name in FILES}
    return grpc.ssl_channel_credentials(**{**read, "root_certificates": (ours / "tls" / "ca.crt").read_bytes()})


def called(port: Port, of_client: grpc.ChannelCredentials | None, method: str = NODES) -> str:
    """The status of a call of Ray's with this certificate and no token; None: without TLS.

    A call, as a client's own handshake is over before a server of TLS 1.3 has looked at the certificate.
    """
    place = f"{port.address}:{port.number}"
    with grpc.secure_channel(place, of_client) if of_client else grpc.insecure_channel(place) as channel:
        try:
            channel.unary_unary(method)(b"", timeout=CALL_S)
        except grpc.RpcError as exc:
            return exc.code().name
        return "OK"


def speaks_http(port: Port) -> bool:
    """Whether it answers without any TLS, as a server of pages does."""
    with contextlib.suppress(OSError), socket.create_connection((port.address, port.number), timeout=CALL_S) as plain:
        plain.sendall(REQUEST)
        return plain.recv(5).startswith(b"HTTP/")
    return False


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_nodes_with_certificates_speak_tls_and_take_nobody_without_one(tmp_path):
    for name in ("ours", "others"):
        (tmp_path / name).mkdir()
    ours, others = tmp_path / "ours", tmp_path / "others"
    mark, name = f"{os.getpid()}-{time.monotonic_ns()}", f"s{os.getpid()}"
    environment = {**made(ours), MARK: mark}
    made(others)

    def run(*command, **variables):
        return subprocess.run(
            command, cwd=ROOT, env={**environment, **variables}, capture_output=True, text=True, timeout=700
        )

    clients = {
        "right": credentials(ours),
        "none": credentials(ours, OF_PEERS),
        "of another authority": mixed(ours, others),
        "without TLS": None,
    }
    try:
        up = run(*SCALERAY, "cluster", "up", name, "--nodes", "2", "--cpus", "2", "--json")
        assert up.returncode == 0, up.stdout[-2000:] + up.stderr[-2000:]
        [cluster] = json.loads(up.stdout)["clusters"]
        words = ["train", "-c", "jobs/digits.yaml", "--stop.after", "100000 epochs", "--scale.workers", "2"]
        words += ["--scale.placement", "STRICT_SPREAD", "--scale.cpus-per-worker", "1"]
        words += [
            "--checkpoint.storage-path",
            str(tmp_path / "runs"),
            "--tracking.uri",
            f"sqlite:///{tmp_path}/mlflow.db",
        ]
        with open(tmp_path / "log", "w") as log:
            train = subprocess.Popen(
                [*SCALERAY, *words], cwd=ROOT, env={**environment, "RAY_ADDRESS": cluster["address"]},
                stdout=log, stderr=log,
            )  # fmt: skip
        said = (tmp_path / "log").read_text
        wait_until(lambda: "step " in said() or train.poll() is not None, seconds=300)
        assert train.poll() is None, said()[-2000:]
        opened = ports(mark)
        assert all(port.is_on_loopback for port in opened), opened
        told = {port: {name: called(port, client) for name, client in clients.items()} for port in opened}
        pages = {port for port in opened if speaks_http(port)}
        of_ray = {port: each for port, each in told.items() if each["right"] in ("UNAUTHENTICATED", "UNIMPLEMENTED")}
        without_token = {port: {name: called(port, clients["right"], name) for name in METHODS} for port in of_ray}
        train.send_signal(signal.SIGINT)
        train.wait(timeout=100)
        print(*(f"{p.number} {p in pages} {told[p]} {p.process[:150]}" for p in opened), sep="\n")
        names = " ".join(port.process for port in of_ray)
        for word in ("gcs_server", "raylet", "client.server", "DashboardAgent", "scaleray train", "TrainController"):
            assert word in names, names
        assert len(of_ray) >= 12, told  # of the nodes eight; the driver, and every worker and actor
        assert all(map(is_refused, without_token.values())), without_token
        for each in of_ray.values():
            assert {*each.values()} - {each["right"]} == {"UNAVAILABLE"}, each
        rest = {port.process for port in told.keys() - of_ray.keys() - pages}
        assert all("ray::" in process for process in rest), rest  # gloo and torch's store, in workers
    finally:
        down = run(*SCALERAY, "cluster", "down", name)
        left = processes(mark)
        for process in left:
            process.kill()
    assert " is down" in down.stdout and not left, left
