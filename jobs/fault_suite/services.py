"""An S3 server and an MLflow server of the suite's own, which can be made to fail."""

from __future__ import annotations

import contextlib
import http.server
import logging
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import requests

from scaleray.common.guarded import guarded
from scaleray.launch.cluster.own_ray import free_port


class Bucket:
    """An S3 emulator in a thread. failing: it answers 500 to every request. on_shard: called when the first bytes of a
    shard of a checkpoint arrive, before it takes them."""

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for every request
        self.failing = threading.Event()
        self.num_refused = 0
        self.on_shard: Callable[[], None] | None = None
        application = DomainDispatcherApplication(create_backend_app)

        def answer(environ: Any, start_response: Any) -> Any:
            if environ["REQUEST_METHOD"] in ("PUT", "POST") and environ["PATH_INFO"].endswith(".bin"):
                on_shard, self.on_shard = self.on_shard, None
                if on_shard is not None:
                    on_shard()
            if self.failing.is_set():
                self.num_refused += 1
                start_response("500 Internal Server Error", [("Content-Type", "text/plain")])
                return [b"the fault suite says no"]
            return application(environ, start_response)

        self.server = make_server("127.0.0.1", 0, answer, threaded=True)
        self.thread = threading.Thread(target=self.server.serve_forever, name="s3", daemon=True)
        self.thread.start()
        import boto3

        os.environ |= self._environment()
        boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"]).create_bucket(Bucket="faults")

    def _environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server.port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REGION": "us-east-1",
        }

    def close(self) -> None:
        """Stop it."""
        self.server.shutdown()


class TrackingServer:
    """`mlflow server` over an SQLite file, in processes that can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def uri(self) -> str:
        """For tracking.uri."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it and wait until it answers."""
        command = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--backend-store-uri",
            f"sqlite:///{self.folder / 'mlflow.db'}",
            "--artifacts-destination",
            str(self.folder / "artifacts"),
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--workers",
            "1",
        ]
        self.process = subprocess.Popen(
            guarded(command),
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=1).close()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.3)

    def kill(self) -> bool:
        """SIGKILL to all of its processes; true when they are gone."""
        if self.process is None:
            return False
        family = [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        self.process.wait(timeout=20)
        _, alive = psutil.wait_procs(family, timeout=20)
        self.process = None
        return not alive


TROUBLES = ("refusal", "nothing", "late", "401", "redirect")
"""Kinds of wrong answers of a `Proxy`: 500; 200 with an empty body; right, after three seconds; 401; 302 to a port at
which nothing listens."""


class Proxy:
    """An HTTP proxy before an MLflow server, which can be made to answer in a wrong way."""

    def __init__(self, target: str) -> None:
        self.trouble, self.num_troubled = "", 0
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                trouble = proxy.trouble
                proxy.num_troubled += bool(trouble)
                if trouble == "late":
                    time.sleep(3.0)
                if trouble in ("", "late"):
                    headers = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "connection")}
                    found = requests.request(
                        self.command, target + self.path, data=body, headers=headers, allow_redirects=False, timeout=60
                    )
                    code, content, extra = found.status_code, found.content, {}
                else:
                    code = {"refusal": 500, "nothing": 200, "401": 401, "redirect": 302}[trouble]
                    content, extra = b"", {"Location": "http://127.0.0.1:1/"} if code == 302 else {}
                self.send_response(code)
                for name, value in {"Content-Length": str(len(content)), **extra}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer

            def log_message(self, *arguments: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, name="proxy", daemon=True).start()

    @property
    def uri(self) -> str:
        """For tracking.uri."""
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def begin(self, trouble: str) -> None:
        """Answer so from now on; "" is right."""
        self.trouble, self.num_troubled = trouble, 0


@contextlib.contextmanager
def bucket() -> Iterator[Bucket]:
    """An S3 server for as long as the context lasts, in the environment of all that is started meanwhile."""
    server = Bucket()
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def tracking_server(folder: Path) -> Iterator[TrackingServer]:
    """An MLflow server for as long as the context lasts."""
    server = TrackingServer(folder)
    try:
        yield server
    finally:
        server.kill()
