"""The folder of one user alone: the same one at every call, even where another user has taken its name."""

import os

import pytest

from scaleray import own_folder


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(own_folder, "short_place", lambda: tmp_path)
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
