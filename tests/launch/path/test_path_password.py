"""A path whose MLflow has a password in its address: it comes from the environment, and is stored and shown nowhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from mlflow.artifacts import download_artifacts

import scaleray
from scaleray.errors import TrackingError
from scaleray.launch.path import fetched, state
from scaleray.launch.path.fetched import fetch_path
from scaleray.reports.records.path import write_path_page
from scaleray.tracking import store
from tests.launch.path.conftest import JOB

URI = "http://me:hunter2@127.0.0.1:9"


@pytest.fixture
def database(tmp_path, empty_database, monkeypatch):
    """An MLflow that stands in for the one at URI."""
    real, place = store.open_client, f"sqlite:///{shutil.copy(empty_database, tmp_path / 'mlflow.db')}"
    for module in (store, state, fetched):
        monkeypatch.setattr(module, "open_client", lambda uri: real(place))
    for module in (store, state):
        monkeypatch.setattr(module, "check_reachable", lambda uri, **_: None)
    (tmp_path / "job.py").write_text("class Job:\n    pass\n")
    (tmp_path / "job.yaml").write_text(JOB)
    return place


def start(folder, **keys):
    keys = {"checkpoint.storage_path": str(folder / "runs"), **keys}
    return state.start_path(folder / "job.yaml", "test/accuracy >= 0.9", workers=2, runs=2, name="p", overrides=keys)


def secrets_in(folder):
    return [path for path in Path(folder).rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]


def test_the_password_is_in_no_file_artifact_page_or_command(tmp_path, database, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", URI)
    path = start(tmp_path, **{"tracking.uri": URI})
    path = scaleray.skip_on_path("distribute/doctor", "the machine is known", name=path.folder)
    assert path.copy_behind == "" and secrets_in(path.folder) == []
    kept = download_artifacts(run_id=path.run_id, dst_path=str(tmp_path / "kept"), tracking_uri=database)
    assert (Path(kept) / "path.json").exists() and secrets_in(kept) == []
    commands = [word for task in path.tasks for word in task.command]
    assert "http://me:***@127.0.0.1:9" in commands and "hunter2" not in " ".join(commands)
    write_path_page(path, tmp_path / "page.html")
    assert "hunter2" not in (tmp_path / "page.html").read_text()
    shutil.rmtree(path.folder)
    assert secrets_in(fetch_path("p", storage_path=str(tmp_path / "new")).folder) == []


def test_an_address_whose_password_the_next_command_cannot_know_begins_no_path(tmp_path, database):
    with pytest.raises(TrackingError, match="set MLFLOW_TRACKING_URI to the address with its password") as caught:
        start(tmp_path, **{"tracking.uri": URI})
    assert "hunter2" not in str(caught.value) and not (tmp_path / "runs").exists()


def test_a_saved_address_has_the_password_of_the_environment_only_if_all_else_is_the_same(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", URI)
    assert store.resolve_uri("http://me:***@127.0.0.1:9") == URI
    monkeypatch.setenv("MLFLOW_TRACKING_URI", given := "postgresql://db/mlflow?user=me&password=hunter2")
    assert store.resolve_uri(store.without_password(given)) == given
    monkeypatch.setenv("MLFLOW_TRACKING_URI", URI)
    with pytest.raises(TrackingError, match="whose password is not kept"):
        store.resolve_uri("http://me:***@other:9")
