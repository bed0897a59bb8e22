"""MLflow's pages for a database without a server."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys

from scaleray.common.guarded import ending_like_ctrl_c, guarded
from scaleray.common.installed import names_what_is_missing
from scaleray.errors import TrackingError
from scaleray.recording import store


@names_what_is_missing
def tracking_ui(*, uri: str | None = None, port: int = 5000) -> int:
    """Serve MLflow's pages for runs in a database file, only on 127.0.0.1, until interrupted by Ctrl-C, SIGTERM or a
    closed terminal. Returns the exit code.

    uri: tracking URI; None for the one that trainings use. port: 0 chooses a free one. Raises TrackingError if the port
    is taken or the URI is a server."""
    uri = store.resolve_uri(uri)
    shown = store.without_password(uri)
    if uri.startswith("http"):
        raise TrackingError.problem("tracking.uri", f"{shown} is already a server", f"open {shown} in a browser")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as exc:
            raise TrackingError.problem(
                "The port", f"{port} is in use by another program", "choose one with --port"
            ) from exc
        port = int(probe.getsockname()[1])  # where 0 asked for any
    store.check_reachable(uri)
    if importlib.util.find_spec("mlflow") is None:
        raise ModuleNotFoundError("No module named 'mlflow'", name="mlflow")
    print(
        f"MLflow for {shown}: http://127.0.0.1:{port}/#/experiments?workflowType=machine_learning (Ctrl-C ends it)",
        flush=True,
    )
    # MLflow's background jobs would start eight more processes that nothing here uses
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    # not options: other users see those in the list of processes
    environment |= {"MLFLOW_BACKEND_STORE_URI": uri, "MLFLOW_REGISTRY_STORE_URI": uri}
    is_deprecated = "ignore:starlette.middleware.wsgi is deprecated"  # a matter between MLflow and its server
    environment["PYTHONWARNINGS"] = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), is_deprecated]))
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
        "--uvicorn-opts",
        "--no-access-log --log-level warning",  # else a line for every request of a page
    ]
    with ending_like_ctrl_c():
        process = subprocess.Popen(guarded(command), env=environment)  # it starts a server, which starts workers
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            return 0
