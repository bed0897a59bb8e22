"""A promoted model on a real MLflow server that asks for a password, served and asked by HTTP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

import scaleray
from scaleray.launch.cluster.own_ray import free_port
from scaleray.launch.promote.check import check_promoted
from scaleray.launch.promote.promote import promote
from tests.launch.promote.conftest import POLICY
from tests.tracking.test_real_server import stop_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROWS = {"x": np.eye(4, dtype=np.float32)}


def start(words, log, address, **more):
    process = subprocess.Popen(
        [sys.executable, "-m", "mlflow", *words],
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            **more,
        },
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(address, timeout=1).close()
            return process
        except OSError:
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-2000:])


def asked(port, rows):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/invocations",
        data=json.dumps({"inputs": {name: values.tolist() for name, values in rows.items()}}).encode(),
        headers={"Content-Type": "application/json"},
    )
    return json.loads(urllib.request.urlopen(request, timeout=60).read())["predictions"]


def test_a_model_in_a_file_is_served_by_mlflow(sides, tmp_path):
    candidates, baselines, uri = sides
    promote(candidates, "champion", against=baselines, policy=POLICY, uri=uri)
    port = free_port()
    words = ["models", "serve", "-m", "models:/corners@champion", "--env-manager", "local", "--port", str(port)]
    server = start(words, tmp_path / "log", f"http://127.0.0.1:{port}/ping", MLFLOW_TRACKING_URI=uri)
    try:
        answers, own = asked(port, ROWS), scaleray.load(candidates[0]).predict(ROWS)
        assert answers == {"corner": own["corner"].tolist(), "name": own["name"]}
    finally:
        stop_server(server)


def test_a_server_with_a_password_takes_promotions_and_refuses_those_without(tmp_path, sides, monkeypatch):
    port, folder = free_port(), tmp_path / "server"
    folder.mkdir()
    auth = tmp_path / "auth.ini"
    auth.write_text(
        f"[mlflow]\ndefault_permission = READ\ndatabase_uri = sqlite:///{folder}/auth.db\nadmin_username = admin\n"
        "admin_password = a-long-password-of-a-test\nauthorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
    )
    words = ["server", "--app-name", "basic-auth", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    words += ["--artifacts-destination", str(folder / "artifacts"), "--host", "127.0.0.1", "--port", str(port)]
    address = f"http://127.0.0.1:{port}"
    more = {"MLFLOW_AUTH_CONFIG_PATH": str(auth), "MLFLOW_FLASK_SERVER_SECRET_KEY": "of-a-test"}
    server = start([*words, "--workers", "1"], tmp_path / "log", f"{address}/health", **more)
    try:
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "a-long-password-of-a-test")
        config = json.loads(Path(sides[0][0], "run.json").read_text())["config"]
        config["tracking"].update(uri=address, run_name="on-the-server")
        run = scaleray.train(config, local=True)
        found = promote(run.run_dir, uri=address)
        assert found.version == 1 and check_promoted("corners/1", uri=address).answer == "pass"
        model = scaleray.load("models:/corners/1", uri=address)
        assert np.array_equal(model.predict(ROWS)["corner"], scaleray.load(run.run_dir).predict(ROWS)["corner"])
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "another")
        with pytest.raises(scaleray.ScaleRayError, match="cannot be read or written"):
            check_promoted("corners/1", uri=address)
    finally:
        stop_server(server)
