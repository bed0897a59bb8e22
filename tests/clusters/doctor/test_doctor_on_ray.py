"""The command on a Ray cluster, and what is said of one that does not let it in."""

from __future__ import annotations

import json
import os

import pytest
from forked_command import ForkedCommand

from scaleray.cli.main import run_command


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


@pytest.mark.combination
@pytest.mark.ray
def test_a_wrong_token_is_one_message_without_the_token(ray_head, tmp_path):
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a-wrong-one" * 6}
    command = ForkedCommand(["doctor", "--address", ray_head.address], cwd=tmp_path, environment=environment)
    said = "".join(command.communicate(timeout=600))
    assert command.returncode == 2, said
    assert "the token is different from the cluster's" in said and ray_head.address in said and "RAY_AUTH_TOKEN" in said
    assert "a-wrong-one" not in said and "Traceback" not in said and "gcs_client" not in said, said
