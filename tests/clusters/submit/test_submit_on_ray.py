"""A job on a real head, from its submission to its exit code."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_until

from scaleray.checkpoints.catalog import Catalog
from scaleray.cli.main import run_command
from scaleray.clusters.submit.jobs_api import Jobs
from scaleray.common.git_state import git_state
from scaleray.errors import ClusterError

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

HERE = Path(__file__).parents[2] / "launch"


@pytest.fixture
def words(tmp_path, mlflow_database, monkeypatch):
    """A folder with a training as the current one, the token in the environment; the training's options."""
    project = tmp_path / "project"
    project.mkdir()
    shutil.copy(HERE / "workloads.py", project)
    (project / "run.yaml").write_text(
        "workload: {name: workloads.py:Line}\nbatch: {global_size: 16}\noptimizer: {learning_rate: 0.05}\nstop: {after: 4 steps}\n"
    )
    git = ["git", "-C", str(project), "-c", "user.name=a", "-c", "user.email=a@b"]
    for more in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *more], check=True)
    monkeypatch.chdir(project)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    return ["--tracking.uri", f"sqlite:///{mlflow_database}", "--checkpoint.storage-path", str(tmp_path / "runs")]


def test_a_training_is_submitted_followed_and_recorded_and_a_wrong_token_is_refused(
    ray_head, words, tmp_path, monkeypatch, capsys
):
    asked = ["submit", "-c", "run.yaml", "--to", ray_head.dashboard, "--wait", "--json", *words]
    assert run_command([*asked, "--tracking.run-name", "mine"]) == 0
    printed = capsys.readouterr()
    job = json.loads(printed.out)
    assert job["status"] == "SUCCEEDED" and "done: 4 steps" in printed.err and "2 files" in printed.err
    record = json.loads((tmp_path / "runs" / "mine" / "record.json").read_text())
    assert record["status"] == "FINISHED" and record["environment"]["environment"]["git"] == git_state(Path.cwd())
    assert git_state(Path.cwd())["is_dirty"] is False
    names = [one.name for one in Jobs(ray_head.dashboard).list()]
    assert job["name"] in names and not any(name.startswith("scaleray-probe") for name in names)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a-wrong-one")
    with pytest.raises(ClusterError, match="rejected the token") as raised:
        Jobs(ray_head.dashboard)
    assert "a-wrong-one" not in str(raised.value)


@pytest.mark.combination
def test_rays_own_command_runs_a_training_and_fails_where_that_does(ray_head, words, tmp_path):
    ray = [str(Path(sys.executable).parent / "ray"), "job", "submit", "--address", ray_head.dashboard]
    training = [
        "python",
        "-m",
        "scaleray",
        "train",
        "-c",
        "run.yaml",
        "--parallel",
        "auto",
        "--scale.workers",
        "2",
        *words,
    ]
    asked = [*ray, "--working-dir", ".", "--", *training]
    done = subprocess.run([*asked, "--tracking.run-name", "plain"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    record = json.loads((tmp_path / "runs" / "plain" / "record.json").read_text())
    assert record["status"] == "FINISHED" and record["config"]["strategy"]["name"] == "ddp"
    assert "parallel: auto is ddp, data 2" in done.stdout
    failed = subprocess.run([*asked, "--batch.global_size", "0"], capture_output=True, text=True, timeout=600)
    assert failed.returncode == 1 and "batch.global_size is 0" in failed.stdout, failed.stdout[-2000:]


@pytest.mark.combination  # a minute: Ray itself kills after three seconds, so that a checkpoint must take longer
def test_a_training_that_is_stopped_saves_first_however_long_that_takes(ray_head, words, tmp_path):
    marker, slow = tmp_path / "marker", tmp_path / "slow"
    long = [
        "--workload.name",
        "workloads.py:SlowToSave",
        "--workload.args",
        f"{{marker: {marker}, slow: {slow}, seconds: 5}}",
    ]
    asked = ["submit", "-c", "run.yaml", "--to", ray_head.dashboard, "--name", f"slow-{os.getpid()}", *words, *long]
    assert run_command([*asked, "--stop.after", "1000000 steps", "--tracking.run-name", "slow"]) == 0
    jobs, name = Jobs(ray_head.dashboard), f"slow-{os.getpid()}"
    wait_until(lambda: marker.exists() or jobs.job(name).has_ended)
    slow.touch()
    assert run_command(["jobs", "stop", name, "--to", ray_head.dashboard]) == 0
    wait_until(lambda: jobs.job(name).has_ended)
    assert jobs.job(name).status == "STOPPED", jobs.logs(name)
    assert Catalog.of_run(str(tmp_path / "runs" / "slow")).steps(), jobs.logs(name)
