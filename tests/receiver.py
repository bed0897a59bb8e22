"""A receiver of webhooks on this machine, which answers as it is told."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any


class Receiver:
    """What arrived, and how it is answered. answers: status codes in turn, the last one again and again; None keeps the
    caller waiting until the receiver is gone."""

    def __init__(self, answers: Sequence[int | None] = (200,)) -> None:
        self.answers = list(answers)
        self.bodies: list[Any] = []
        self.paths: list[str] = []
        self.port = 0
        self.is_gone = threading.Event()

    def names(self) -> list[str]:
        """Alerts that arrived, with their state."""
        return [f"{alert['labels']['rule']} {body['status']}" for body in self.bodies for alert in body["alerts"]]

    def url(self, path: str = "/") -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}{path}"


@contextlib.contextmanager
def receiving(answers: Sequence[int | None] = (200,)) -> Iterator[Receiver]:
    """A receiver for as long as the context lasts."""
    receiver = Receiver(answers)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            receiver.paths.append(self.path)
            receiver.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            answer = receiver.answers[min(len(receiver.bodies), len(receiver.answers)) - 1]
            if answer is None:
                receiver.is_gone.wait()
                return
            self.send_response(answer)
            if 300 <= answer < 400:
                self.send_header("Location", receiver.url("/elsewhere"))
            self.end_headers()

        def log_message(self, *about: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    receiver.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.is_gone.set()
        server.shutdown()
        server.server_close()
        thread.join()
