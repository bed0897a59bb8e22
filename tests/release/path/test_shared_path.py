"""A path that several people go along: its files, its lock, a folder that was moved, a call that was killed."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest

import scaleray
from scaleray.errors import UsageError
from scaleray.release.path.path_state import find_path, locked, read, write
from scaleray.release.path.tasks import log_of
from tests.other_users import users
from tests.waiting import wait_until

RUN = """
import sys
from pathlib import Path
from scaleray.release.path.commands import run_command
sys.executable = sys.argv[1]
run_command(["train"], log=Path(sys.argv[2]))
"""
COMMAND = """#!/bin/sh
echo begun >&2
while [ ! -e "$(dirname "$0")/end" ]; do sleep 0.02; done
echo ended >&2
"""
GO_ON = """
import sys, scaleray
from scaleray.errors import UsageError
try:
    path = scaleray.skip_on_path("baseline/baseline-1", "a colleague knows better", name=sys.argv[1])
    print(path.tasks[1].status)
except UsageError as exc:
    print("refused:", exc)
"""


def test_the_state_has_the_mode_that_the_umask_gives(path):
    before = os.umask(0o002)
    try:
        scaleray.skip_on_path("baseline/baseline-0", "later", name=path.folder)
        modes = {name: stat.S_IMODE((Path(path.folder) / name).stat().st_mode) for name in ("path.json", ".lock")}
    finally:
        os.umask(before)
    assert modes == {"path.json": 0o664, ".lock": 0o664}


@pytest.fixture
def shared(path):
    """A path's folder where other users may read."""
    scaleray.skip_on_path("baseline/baseline-0", "later", name=path.folder)
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="path-") as place:
        Path(place).chmod(0o755)
        yield Path(shutil.copytree(path.folder, Path(place) / "path-digits"))


@pytest.mark.slow
def test_a_colleague_goes_on_where_the_folder_is_shared_and_is_told_where_it_is_not(shared):
    folder = shared
    with users(1) as (colleague,):
        folder.chmod(0o700)
        closed = colleague.run(sys.executable, "-c", GO_ON, str(folder))
        assert closed.stdout.startswith("refused: the path is ") and "Permission denied" in closed.stdout
        folder.chmod(0o755)
        refused = colleague.run(sys.executable, "-c", GO_ON, str(folder))
        assert refused.stdout.startswith("refused: The path cannot be used: "), refused.stderr
        assert "Permission denied" in refused.stdout and "chmod -R g+rwX" in refused.stdout
        folder.chmod(0o777)
        (folder / ".lock").chmod(0o644)  # made by its owner, whose it stays
        went_on = colleague.run(sys.executable, "-c", GO_ON, str(folder))
        assert went_on.stdout == "skipped\n", went_on.stderr
        after = read(folder)
        assert after.decisions[-1].why == "a colleague knows better"
        assert (folder / ".lock").stat().st_uid == os.geteuid() != (folder / "path.json").stat().st_uid
        assert scaleray.redo_on_path("baseline/baseline-1", name=str(folder)).tasks[1].status == "open"


def test_what_cannot_be_written_is_one_message(path, monkeypatch):
    def full(self, text):
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UsageError, match="No space left on device"):
        scaleray.skip_on_path("baseline/baseline-0", "later", name=path.folder)


def test_a_task_that_was_cut_off_is_not_said_to_be_running(path):
    cut = [replace(task, status="running") if task.key == "baseline/baseline-0" else task for task in path.tasks]
    write(replace(path, tasks=cut))
    assert find_path(path.folder).tasks[0].status == "interrupted"
    with locked(path) as own:
        assert find_path(path.folder).tasks[0].status == "running" and own.tasks[0].status == "interrupted"


def test_a_moved_folder_is_rerooted_by_whole_parts_of_its_path(path, tmp_path):
    folder = path.folder
    inside = {"tracking_uri": f"sqlite:///{folder}/mlflow.db", "notes": [f"{folder}-2/other", f"{folder}/own", folder]}
    write(replace(path, **inside))
    moved = Path(folder).rename(tmp_path / "moved")
    found = read(moved)
    assert found.notes == [f"{folder}-2/other", f"{moved}/own", str(moved)]
    assert found.tracking_uri == f"sqlite:///{moved}/mlflow.db"
    found = scaleray.redo_on_path("baseline/baseline-0", name=str(moved))
    command = found.tasks[0].command
    assert command[command.index("--tracking.uri") + 1] == found.tracking_uri, "the job still names the old place"


@pytest.mark.combination
def test_a_command_whose_call_was_killed_is_waited_for_and_not_failed(path, commands, tmp_path, capsys):
    task, program = path.tasks[0], tmp_path / "program"
    log = log_of(path, task)
    program.write_text(COMMAND)
    program.chmod(0o755)
    write(replace(path, tasks=[replace(task, status="running"), *path.tasks[1:]]))
    call = subprocess.Popen([sys.executable, "-c", RUN, str(program), str(log)])
    wait_until(lambda: log.exists() and "begun" in log.read_text())
    call.kill()
    call.wait()
    assert find_path(path.folder).tasks[0].status == "running"
    with pytest.raises(UsageError, match="is still running"):
        scaleray.redo_on_path(task.key, name=path.folder)
    with pytest.raises(UsageError, match="is still running"):
        scaleray.skip_on_path(task.key, "it is slow", name=path.folder)
    current_command = threading.Thread(target=scaleray.next_on_path, args=(path.folder,), daemon=True)
    current_command.start()
    said = ""
    while "waiting for the command" not in said:
        said += capsys.readouterr().err
    assert commands.ran == []
    (tmp_path / "end").touch()
    current_command.join(timeout=60)
    assert log.read_text() == "begun\nended\n", "it ended well without the call that began it"
    assert find_path(path.folder).tasks[0].status == "done" and len(commands.ran) == 1
