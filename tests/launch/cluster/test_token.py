"""The token file: made by whoever needs it first, and for this user's eyes only."""

import os
import stat

import pytest

from scaleray.launch.cluster import token


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    for name in (token.TOKEN, token.TOKEN_PATH):
        monkeypatch.setenv(name, "is set again afterwards, or taken away")
        monkeypatch.delenv(name)
    return tmp_path


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_token_is_readable_by_its_user_alone_whatever_the_umask(home):
    before = os.umask(0)
    try:
        token.ensure_token()
    finally:
        os.umask(before)
    file = token.token_file()
    assert mode_of(file) == 0o600 and mode_of(file.parent) == 0o700 and len(bytes.fromhex(file.read_text())) == 32
    text = file.read_text()
    token.ensure_token()
    assert file.read_text() == text and token.has_token()


@pytest.mark.parametrize("kind", ["missing", "a file"])
def test_a_home_that_cannot_hold_the_token(home, monkeypatch, kind):
    """ "did not start: No such file or directory", and the hint was of a loaded machine."""
    monkeypatch.setenv("HOME", str(home / "other"))
    if kind == "a file":
        (home / "other").touch()
    monkeypatch.setattr(token, "own_folder", lambda: home)
    token.ensure_token()
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(home / "auth_token")
    assert mode_of(home / "auth_token") == 0o600
    written = (home / "auth_token").read_text()
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")  # as the next command begins
    assert token.has_token() and os.environ["RAY_AUTH_TOKEN_PATH"] == str(home / "auth_token")
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    token.ensure_token()
    assert (home / "auth_token").read_text() == written
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    monkeypatch.setenv("HOME", str(home))
    assert not token.has_token()  # a home that can hold one has its own
    monkeypatch.setenv("HOME", str(home / "other"))
    assert token.has_token()
    assert token.headers() == {"Authorization": f"Bearer {written}"}


def test_a_token_that_ray_left_readable_for_all_is_closed(home):
    token.token_file().parent.mkdir()
    token.token_file().write_text("of Ray")
    token.token_file().chmod(0o644)
    token.ensure_token()
    assert mode_of(token.token_file()) == 0o600 and token.token_file().read_text() == "of Ray"


@pytest.mark.parametrize(("name", "value"), [("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "x")])
def test_no_file_is_made_where_none_is_used(home, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    token.ensure_token()
    assert not token.token_file().exists()
