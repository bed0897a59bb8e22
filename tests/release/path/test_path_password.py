"""A path whose MLflow has a password in its address: it comes from the environment, and is stored and shown nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

import scaleray
from scaleray.cli.main import run_command
from scaleray.errors import TrackingError
from scaleray.recording import store
from scaleray.release.path import path_state
from tests.release.path.conftest import JOB

URI = "http://me:hunter2@127.0.0.1:9"


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job whose MLflow at URI answers."""
    monkeypatch.setattr(path_state, "check_reachable", lambda uri: None)
    (tmp_path / "job.py").write_text("class Job:\n    pass\n")
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def start(folder, **keys):
    keys = {"checkpoint.storage_path": str(folder / "runs"), **keys}
    return path_state.start_path(
        folder / "job.yaml", "test/accuracy >= 0.9", workers=2, runs=2, name="p", overrides=keys
    )


def secrets_in(folder):
    return [path for path in Path(folder).rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]


def test_the_password_is_in_no_file_command_or_output(job, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", URI)
    path = start(job, **{"tracking.uri": URI})
    path = scaleray.skip_on_path("distribute/doctor", "the machine is known", name=path.folder)
    assert secrets_in(path.folder) == []
    commands = [word for task in path.tasks for word in task.command]
    assert "http://me:***@127.0.0.1:9" in commands and "hunter2" not in " ".join(commands)
    for words in (["status"], ["status", "--json"], ["next", "--print", "--until", "produce"]):
        run_command(["path", *words, "--name", path.folder])
    said = capsys.readouterr()
    assert "the machine is known" in said.out and "hunter2" not in said.out + said.err


def test_an_address_whose_password_the_next_command_cannot_know_begins_no_path(job):
    with pytest.raises(TrackingError, match="set MLFLOW_TRACKING_URI to the address with its password") as caught:
        start(job, **{"tracking.uri": URI})
    assert "hunter2" not in str(caught.value) and not (job / "runs").exists()


def test_a_saved_address_has_the_password_of_the_environment_only_if_all_else_is_the_same(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", URI)
    assert store.resolve_uri("http://me:***@127.0.0.1:9") == URI
    monkeypatch.setenv("MLFLOW_TRACKING_URI", given := "postgresql://db/mlflow?user=me&password=hunter2")
    assert store.resolve_uri(store.without_password(given)) == given
    monkeypatch.setenv("MLFLOW_TRACKING_URI", URI)
    with pytest.raises(TrackingError, match="was saved without its password"):
        store.resolve_uri("http://me:***@other:9")
