"""A server that answers as Grafana's HTTP API does where dashboards are imported, and checks them by Grafana's schema."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jsonschema

TOKEN = "glsa_a-secret_0123"
SCHEMA = jsonschema.Draft7Validator(
    json.loads((Path(__file__).parent / "grafana_dashboard.schema.json").read_text(encoding="utf-8"))
)


class StandIn(ThreadingHTTPServer):
    """answer: what every request gets instead, as a status, headers and a body."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folders: list[dict[str, str]] = [{"uid": "general-things", "title": "Others"}]
        self.dashboards: dict[str, tuple[str, dict[str, Any]]] = {}
        self.asked: list[str] = []
        self.answer: tuple[int, dict[str, str], bytes] | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        self.server.asked.append(f"GET {self.path}")
        if self._is_let_in():
            self._say(200, self.server.folders)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(f"POST {self.path}")
        if not self._is_let_in():
            return
        if self.path == "/api/folders":
            folder = {"uid": f"folder-{len(self.server.folders)}", "title": body["title"]}
            self.server.folders.append(folder)
            self._say(200, folder)
        else:
            self._say(*self._import(body))

    def _import(self, body: dict[str, Any]) -> tuple[int, Any]:
        dashboard = body["dashboard"]
        if errors := [error.message for error in SCHEMA.iter_errors(dashboard)]:
            return 400, {"message": "; ".join(errors)}
        if body["folderUid"] not in {folder["uid"] for folder in self.server.folders}:
            return 400, {"message": "folder not found"}
        uid = dashboard["uid"]
        if uid in self.server.dashboards and not body["overwrite"]:
            return 412, {"message": "The dashboard has been changed by someone else", "status": "version-mismatch"}
        self.server.dashboards[uid] = (body["folderUid"], dashboard)
        return 200, {"uid": uid, "url": f"/d/{uid}/page", "status": "success"}

    def _is_let_in(self) -> bool:
        if self.server.answer is not None:
            status, headers, body = self.server.answer
            self._send(status, headers, body)
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._say(401, {"message": "Invalid API key"})
        else:
            return True
        return False

    def _say(self, status: int, value: Any) -> None:
        self._send(status, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Say nothing in the output of tests."""


@contextlib.contextmanager
def stand_in() -> Iterator[StandIn]:
    """A running server, gone at the end."""
    server = StandIn()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
