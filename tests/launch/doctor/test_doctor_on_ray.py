"""The command on a Ray cluster, and what is said of one that does not let it in."""

from __future__ import annotations

import contextlib
import json
import os

import pytest

from scaleray.cli.main import run_command
from scaleray.errors import ClusterError
from scaleray.launch.cluster import token as of_user
from scaleray.launch.doctor import on_ray

LINE = "[W 1] gcs_client.cc:210: Unauthenticated: RPC error: InvalidAuthToken: Authentication token is missing or incorrect\n"


@pytest.mark.ray
@pytest.mark.combination
@pytest.mark.timeout(900)
def test_a_cluster_that_is_well_has_nothing_red(ray_session, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    words = ["--address", ray_session.address, "--storage", f"{tmp_path}/runs", "--json"]
    assert run_command(["doctor", *words]) == 0
    record = json.loads(capsys.readouterr().out)
    assert not [check for check in record["checks"] if check["verdict"] == "red"]
    [node] = record["measured"]["nodes"]
    assert node["is_drivers"] and node["ray_gpus"] == 0 and node["object_store_bytes"]
    assert record["address"] == ray_session.address and not (tmp_path / "runs").exists()


def refusing(text):
    @contextlib.contextmanager
    def joined(address, *, name):
        os.write(2, text.encode())
        raise ClusterError(name, address, "no Ray cluster answers there")
        yield

    return joined


@pytest.mark.parametrize(("token", "found"), [("a-wrong-one", "another than the cluster's"), (None, "missing")])
def test_a_wrong_token_is_one_message_without_the_token(monkeypatch, capfd, token, found):
    monkeypatch.setattr(on_ray, "joined", refusing(LINE * 20))
    monkeypatch.setattr(of_user, "has_token", lambda: token is not None)
    monkeypatch.setenv("RAY_AUTH_MODE", "")  # put back afterwards what the command sets, and an earlier one has set
    monkeypatch.delenv("RAY_AUTH_MODE")
    if token:
        monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    assert run_command(["doctor", "--address", "10.0.0.1:6379"]) == 2
    message = capfd.readouterr().err
    assert found in message and "asks for its own" in message and "RAY_AUTH_TOKEN" in message
    assert "gcs_client" not in message and "a-wrong-one" not in message


def test_what_else_ray_says_is_not_lost(monkeypatch, capfd):
    monkeypatch.setattr(on_ray, "joined", refusing("something else\n"))
    assert run_command(["doctor", "--address", "10.0.0.1:6379"]) == 2
    message = capfd.readouterr().err
    assert "something else" in message and "--address is '10.0.0.1:6379'" in message
