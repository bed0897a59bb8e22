"""The folder of one user alone: the same one at every call, even where another user has taken its name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scaleray.common import own_folder


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(own_folder, "short_path", lambda: tmp_path)
    own_folder._folder_of_this_process.cache_clear()
    yield tmp_path
    own_folder._folder_of_this_process.cache_clear()


@pytest.mark.parametrize("num_taken", [1, own_folder.NAMES])
def test_where_the_name_is_taken_every_call_gives_the_same_folder(place, num_taken):
    """Each call made another one, which stayed; logs were said to be in a third."""
    for number in range(num_taken):  # a link is nobody's folder, as another user's would be
        (place / f"scaleray-{os.getuid()}{f'-{number}' * bool(number)}").symlink_to("/")
    found = {own_folder.own_folder() for _ in range(3)}
    assert len(found) == 1
    assert len(list(place.iterdir())) == num_taken + 1
    assert found.pop().stat().st_mode & 0o777 == 0o700


def test_an_environment_in_a_folder_with_a_space_is_run_through_a_link_without_one(tmp_path, monkeypatch):
    environment = tmp_path / "a folder"
    environment.symlink_to(sys.prefix)
    monkeypatch.setattr(own_folder, "own_folder", lambda: tmp_path)
    monkeypatch.setattr(sys, "executable", f"{environment}/bin/{Path(sys.executable).name}")
    paths = {own_folder.plain_executable() for _ in range(2)}
    assert len(paths) == 1 and not any(" " in path for path in paths)
    code = "import sys, scaleray; print(sys.prefix != sys.base_prefix)"
    is_environment = subprocess.run([*paths, "-c", code], capture_output=True, text=True, check=True).stdout
    assert is_environment.strip() == str(sys.prefix != sys.base_prefix)


def test_an_environment_without_a_space_needs_no_link(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/opt/env/bin/python")
    assert own_folder.plain_executable() == "/opt/env/bin/python"


def test_a_cache_lies_below_the_home_and_without_one_in_the_folder_of_this_user(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert own_folder.cache_folder("models") == tmp_path / ".cache/scaleray/models"
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setattr(own_folder, "own_folder", lambda: tmp_path)
    assert own_folder.cache_folder("models") == tmp_path / "models"
