"""A promoted model on a real MLflow server that asks for a password, served and asked by HTTP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import scaleray
from scaleray.launch.cluster.own_ray import free_port
from scaleray.models.registry import ModelRegistry, Named
from scaleray.release.promote.promote import promote
from scaleray.release.promote.rollback import rollback
from scaleray.release.promote.verify_promoted import check_promoted
from tests.recording.test_real_server import stop_server
from tests.release.promote.conftest import POLICY

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


PASSWORD = "a-long-password-of-a-test"


class Server:
    """A real MLflow server with basic-auth, which can be stopped and started again on the same port and files."""

    def __init__(self, folder):
        self.folder, self.port = folder, free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        folder.mkdir()
        (folder / "auth.ini").write_text(
            f"[mlflow]\ndefault_permission = READ\ndatabase_uri = sqlite:///{folder}/auth.db\nadmin_username = admin\n"
            f"admin_password = {PASSWORD}\n"
            "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
        )

    def start(self):
        words = ["server", "--app-name", "basic-auth", "--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"]
        words += ["--artifacts-destination", str(self.folder / "artifacts"), "--host", "127.0.0.1"]
        more = {"MLFLOW_AUTH_CONFIG_PATH": str(self.folder / "auth.ini"), "MLFLOW_FLASK_SERVER_SECRET_KEY": "of-a-test"}
        words += ["--port", str(self.port), "--workers", "1"]
        self.process = start(words, self.folder / "log", f"{self.address}/health", **more)

    def stop(self):
        if self.process.poll() is None:
            stop_server(self.process)


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    found = Server(tmp_path / "server")
    found.start()
    yield found
    found.stop()


def failing(name, server):
    (gate,) = check_promoted(name, uri=server.address).gates
    return {check.what: check.words for check in gate.checks if check.answer == "fail"}


def test_a_server_with_a_password_holds_out_against_all_that_is_done_to_it(server, sides, monkeypatch):
    config = json.loads(Path(sides[0][0], "run.json").read_text())["config"]
    runs = []
    for seed in range(2):
        config["tracking"].update(uri=server.address, run_name=f"on-the-server-{seed}")
        runs.append(scaleray.train({**config, "seed": seed}, local=True))
    candidates, given = [run.run_dir for run in runs], {"against": sides[1], "uri": server.address}
    registry = ModelRegistry(server.address)

    # the server goes away in the middle: nothing is promoted, and the same command goes on
    real = ModelRegistry.make

    def away(self, *args, **more):
        server.stop()
        return real(self, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(ModelRegistry, "make", away)
        with pytest.raises(scaleray.ScaleRayError, match="repeat the command once MLflow is available again"):
            pytest.fail(str(promote(candidates, "champion", policy=POLICY, **given).not_passed))
    server.start()
    assert registry.expected("corners", "champion") is None
    found = promote(candidates, "champion", policy=POLICY, **given)
    assert found.version == 1 and check_promoted("corners@champion", uri=server.address).answer == "pass"

    # two promotions at once end with one that both agree on
    wide = {**POLICY, "convergence": {**POLICY["convergence"], "margin": 0.99}}
    with ThreadPoolExecutor(2) as pool:
        made = list(
            pool.map(lambda runs: promote(runs, "champion", policy=wide, **given), [candidates, candidates[::-1]])
        )
    assert {one.version for one in made} == {2, 3}
    now = registry.find(Named.parse("corners@champion"))
    assert now.number == registry.expected("corners", "champion").number
    assert check_promoted("corners@champion", uri=server.address).answer == "pass"

    # by hand: the alias, one byte, the run
    registry.client.set_registered_model_alias("corners", "champion", "1")
    assert "promoted last" in failing("corners@champion", server)["the alias names the promoted version"]
    assert rollback("corners@champion", to=now.number, uri=server.address) == now.number
    file = next((server.folder / "artifacts").rglob(f"{now.promotion}/data/packed/weights/*.safetensors"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "was changed" in failing("corners@champion", server)["every file is unchanged since the promotion"]
    file.write_bytes(whole)
    model = scaleray.load("models:/corners@champion", uri=server.address)
    run = next(one for one in runs if one.run_id == now.run_id)
    assert np.array_equal(model.predict(ROWS)["corner"], scaleray.load(run.run_dir).predict(ROWS)["corner"])
    registry.client.delete_run(now.run_id)
    assert "was deleted" in failing("corners@champion", server)["its source run exists"]

    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "another")
    with pytest.raises(scaleray.ScaleRayError, match="cannot be read or written"):
        check_promoted("corners/1", uri=server.address)
