"""A path that several people go along: its files, its lock, a folder that was moved, an MLflow that is away."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

import scaleray
from scaleray.cli.main import run_command
from scaleray.errors import UsageError
from scaleray.launch.path.fetched import fetch_path
from scaleray.launch.path.state import find_path, locked, read, write
from tests.other_users import users

GO_ON = """
import sys, scaleray
from scaleray.errors import UsageError
try:
    path = scaleray.skip_on_path("baseline/baseline-1", "a colleague knows better", name=sys.argv[1])
    print(path.tasks[1].status)
except UsageError as exc:
    print("refused:", exc)
"""


@pytest.fixture
def alone(path):
    return write(replace(path, run_id=""))


def test_the_state_has_the_mode_that_the_umask_gives(alone):
    before = os.umask(0o002)
    try:
        scaleray.skip_on_path("baseline/baseline-0", "later", name=alone.folder)
        modes = {name: stat.S_IMODE((Path(alone.folder) / name).stat().st_mode) for name in ("path.json", ".lock")}
    finally:
        os.umask(before)
    assert modes == {"path.json": 0o664, ".lock": 0o664}


@pytest.fixture
def shared(alone):
    """A path's folder where other users may read."""
    scaleray.skip_on_path("baseline/baseline-0", "later", name=alone.folder)
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="path-") as place:
        Path(place).chmod(0o755)
        yield Path(shutil.copytree(alone.folder, Path(place) / "path-digits"))


@pytest.mark.slow
def test_a_colleague_goes_on_where_the_folder_is_shared_and_is_told_where_it_is_not(shared):
    folder = shared
    with users(1) as (colleague,):
        folder.chmod(0o700)
        closed = colleague.run(sys.executable, "-c", GO_ON, str(folder))
        assert closed.stdout.startswith("refused: the path is ") and "Permission denied" in closed.stdout
        folder.chmod(0o755)
        refused = colleague.run(sys.executable, "-c", GO_ON, str(folder))
        assert refused.stdout.startswith("refused: the path's folder is "), refused.stderr
        assert "Permission denied" in refused.stdout and "chmod -R g+rwX" in refused.stdout
        folder.chmod(0o777)
        (folder / ".lock").chmod(0o644)  # made by its owner, whose it stays
        went_on = colleague.run(sys.executable, "-c", GO_ON, str(folder))
        assert went_on.stdout == "skipped\n", went_on.stderr
        after = read(folder)
        assert after.decisions[-1].why == "a colleague knows better"
        assert (folder / ".lock").stat().st_uid == os.geteuid() != (folder / "path.json").stat().st_uid
        assert scaleray.redo_on_path("baseline/baseline-1", name=str(folder)).tasks[1].status == "open"


def test_a_path_whose_folder_is_gone_goes_on_from_its_copy_in_mlflow(path, commands, tmp_path):
    scaleray.next_on_path(path.folder)
    scaleray.skip_on_path("distribute/doctor", "the machine is known", name=path.folder)
    with pytest.raises(UsageError, match="it is there"):
        fetch_path("digits", storage_path=str(tmp_path / "new"), uri=path.tracking_uri)
    shutil.rmtree(path.folder)
    words = ["path", "fetch", "digits", "--storage-path", str(tmp_path / "new"), "--uri", path.tracking_uri]
    assert run_command(words) == 0
    found = read(tmp_path / "new" / "path-digits")
    assert [task.status for task in found.tasks[:3]] == ["open", "open", "skipped"]
    assert found.decisions[-1].why == "the machine is known"
    before = json.loads((tmp_path / "new/path-digits/path.before.json").read_text())
    assert before["tasks"][0]["figures"]["samples_per_s"] == 100.0
    after = scaleray.next_on_path(found.folder)
    assert after.tasks[0].status == "done" and str(tmp_path / "new") in " ".join(after.tasks[0].command)
    with pytest.raises(UsageError, match="MLflow has none of this name"):
        fetch_path("letters", uri=path.tracking_uri)


def test_what_cannot_be_written_is_one_message(alone, monkeypatch):
    def full(self, text):
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UsageError, match="No space left on device"):
        scaleray.skip_on_path("baseline/baseline-0", "later", name=alone.folder)


def test_a_task_that_was_cut_off_is_not_said_to_be_running(alone):
    cut = [replace(task, status="running") if task.key == "baseline/baseline-0" else task for task in alone.tasks]
    write(replace(alone, tasks=cut))
    assert find_path(alone.folder).tasks[0].status == "interrupted"
    with locked(alone) as own:
        assert find_path(alone.folder).tasks[0].status == "running" and own.tasks[0].status == "interrupted"


def test_a_moved_folder_is_rerooted_by_whole_parts_of_its_path(alone, tmp_path):
    folder = alone.folder
    inside = {"tracking_uri": f"sqlite:///{folder}/mlflow.db", "notes": [f"{folder}-2/other", f"{folder}/own", folder]}
    write(replace(alone, **inside))
    moved = Path(folder).rename(tmp_path / "moved")
    found = read(moved)
    assert found.notes == [f"{folder}-2/other", f"{moved}/own", str(moved)]
    assert found.tracking_uri == f"sqlite:///{moved}/mlflow.db"
    found = scaleray.redo_on_path("baseline/baseline-0", name=str(moved))
    command = found.tasks[0].command
    assert command[command.index("--tracking.uri") + 1] == found.tracking_uri, "the job still names the old place"


def test_a_copy_in_mlflow_that_is_behind_is_said_and_caught_up(path, commands, tmp_path):
    database = Path(path.tracking_uri.removeprefix("sqlite:///"))
    database.rename(tmp_path / "away.db")
    database.mkdir()
    after = scaleray.next_on_path(path.folder)
    assert after.tasks[0].status == "done" and "cannot be written" in after.copy_behind
    (line,) = [line for line in find_path(path.folder).lines() if "behind" in line]
    assert "the folder is whole" in line
    database.rmdir()
    (tmp_path / "away.db").rename(database)
    after = scaleray.next_on_path(path.folder)
    assert after.copy_behind == "" and not [line for line in after.lines() if "behind" in line]
    from scaleray.tracking.store import open_client

    kept = json.loads(Path(open_client(path.tracking_uri).download_artifacts(path.run_id, "path.json")).read_text())
    assert [task["status"] for task in kept["tasks"][:2]] == ["done", "done"] and kept["copy_behind"] == ""
