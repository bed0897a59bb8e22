"""A job on a real head, from its submission to its exit code."""

import json
import shutil
from pathlib import Path

import pytest

from scaleray.cli.main import run_command
from scaleray.errors import ClusterError
from scaleray.launch.submit.jobs_api import Jobs

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

HERE = Path(__file__).parent.parent


def test_a_training_is_submitted_followed_and_recorded_and_a_wrong_token_is_refused(
    ray_head, tmp_path, mlflow_database, monkeypatch, capsys
):
    project = tmp_path / "project"
    project.mkdir()
    shutil.copy(HERE / "workloads.py", project)
    (project / "run.yaml").write_text(
        "workload: {name: workloads.py:Line}\nbatch: {global_size: 16}\noptimizer: {learning_rate: 0.05}\nstop: {after: 4 steps}\n"
    )
    monkeypatch.chdir(project)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    words = ["--tracking.uri", f"sqlite:///{mlflow_database}", "--checkpoint.storage-path", str(tmp_path / "runs")]
    asked = ["submit", "-c", "run.yaml", "--to", ray_head.dashboard, "--wait", "--json", *words]
    assert run_command([*asked, "--tracking.run-name", "mine"]) == 0
    printed = capsys.readouterr()
    job = json.loads(printed.out)
    assert job["status"] == "SUCCEEDED" and "done: 4 steps" in printed.err and "2 files" in printed.err
    assert json.loads((tmp_path / "runs" / "mine" / "record.json").read_text())["status"] == "FINISHED"
    names = [one.name for one in Jobs(ray_head.dashboard).list()]
    assert job["name"] in names and not any(name.startswith("scaleray-probe") for name in names)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a-wrong-one")
    with pytest.raises(ClusterError, match="asks for another one") as raised:
        Jobs(ray_head.dashboard)
    assert "a-wrong-one" not in str(raised.value)
