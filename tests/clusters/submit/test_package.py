"""What of a working directory travels to a cluster, and what is refused before anything is read."""

import os
import subprocess
import zipfile

import pytest

from scaleray.clusters.submit.package import check_is_in, contents_of, pack
from scaleray.common.git_state import SENT, git_state
from scaleray.errors import ConfigError


def made(folder, **files):
    """A folder with these files, by path with `__` for a slash, and their text or number of bytes."""
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, int):
            with open(path, "wb") as file:
                file.truncate(content)  # takes no room on the disk
        else:
            path.write_text(content)
    return folder


def write(folder, name, text):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def names(folder):
    return sorted(contents_of(folder, max_mib=1).files)


def test_all_files_travel_but_those_that_ignore_files_name_and_no_job_needs(tmp_path):
    made(tmp_path, a="1", b__c="22", data__big=7, b__secret="x", keep="y")
    write(tmp_path, ".gitignore", "data/\n*.log\n")
    write(tmp_path, "b/.rayignore", "secret\n")
    write(tmp_path, "x.log", "")
    for folder in (".git", "__pycache__", ".venv", "b/node_modules"):
        write(tmp_path, f"{folder}/f", "")
    found = contents_of(tmp_path, max_mib=1)
    assert sorted(found.files) == [".gitignore", "a", "b/.rayignore", "b/c", "keep"]
    assert found.files["b/c"] == 2 and found.left_out == 7
    assert "5 files" in found.to_text() and "7 excluded" in found.to_text()


def test_links_to_folders_and_outside_stay_and_are_named_and_others_travel_as_the_file(tmp_path):
    made(tmp_path, project__a="1", elsewhere__b="22")
    folder = tmp_path / "project"
    (folder / "data").symlink_to(tmp_path / "elsewhere")
    (folder / "round").symlink_to(folder)
    (folder / ".venv").symlink_to(tmp_path / "elsewhere")
    (folder / "b").symlink_to(tmp_path / "elsewhere" / "b")
    (folder / "c").symlink_to(folder / "a")
    found = contents_of(folder, max_mib=1)
    assert found.files == {"a": 1, "c": 1} and found.linked == ("data", "round", "b") and found.left_out == 1
    assert "as they link to folders, excluded files or outside: data, round, b" in found.to_text()
    with pytest.raises(ConfigError, match="outside the working directory"):
        check_is_in(found, folder / "data" / "b", what="--config")


def test_links_to_files_that_stay_do_too_and_are_named(checkout):
    write(checkout, ".rayignore", "left\n")
    made(checkout, left__a="1", late__ignored__key__a="1", later__b="2")
    write(checkout, "late/.gitignore", "ignored/\n")
    for name, to in {
        "settings.txt": "private",
        "log": "old/log",
        "x": "left/a",
        "y": "late/ignored/key/a",
        "z": "settings.txt",
        "to/b": "../later/b",
    }.items():
        (checkout / name).parent.mkdir(exist_ok=True)
        (checkout / name).symlink_to(to)
    git(checkout, "add", "settings.txt", "log", "x", "y", "z")
    found = contents_of(checkout, max_mib=1)
    assert sorted(found.files) == [".rayignore", "job", "kept", "late/.gitignore", "later/b", "to/b"]
    assert found.files["to/b"] == 1 and found.linked == ("log", "settings.txt", "x", "y", "z")


def test_a_line_with_an_exclamation_mark_brings_a_file_back(tmp_path):
    made(tmp_path, a="1", b="2")
    write(tmp_path, ".gitignore", "a\nb\n")
    write(tmp_path, ".rayignore", "!a\n")
    assert names(tmp_path) == [".gitignore", ".rayignore", "a"]


def test_a_pattern_of_a_folder_holds_below_it_alone(tmp_path):
    made(tmp_path, x__a="1", y__a="2")
    write(tmp_path, "x/.gitignore", "a\n")
    assert names(tmp_path) == ["x/.gitignore", "y/a"]


def test_five_gigabytes_are_refused_with_the_largest_folders_and_without_reading_them(tmp_path):
    made(tmp_path, weights__w=4 * 2**30, data__d=2**30, code="x")
    with pytest.raises(ConfigError) as raised:
        contents_of(tmp_path, max_mib=100)
    text = str(raised.value)
    assert "5.0 GiB to upload, more than --max-mib 100" in text
    assert "weights/ 4.0 GiB, data/ 1.0 GiB" in text and ".rayignore" in text


def test_what_is_neither_a_file_nor_a_folder_stays(tmp_path):
    made(tmp_path, a="1")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    assert names(tmp_path) == ["a"]
    with pytest.raises(ConfigError, match="is not a folder"):
        contents_of(tmp_path / "a", max_mib=1)


def test_a_config_outside_or_left_out_or_missing_is_refused_with_the_reason(tmp_path):
    here = made(tmp_path / "here", jobs__a="1", hidden="2")
    made(tmp_path / "there", b="3")
    write(here, ".rayignore", "hidden\n")
    found = contents_of(here, max_mib=1)
    assert check_is_in(found, here / "jobs" / ".." / "jobs" / "a", what="--config") == "jobs/a"
    for path, words in (
        (tmp_path / "there" / "b", "is outside the working directory"),
        (here / "hidden", "excluded by git or one of .gitignore, .rayignore"),
        (here / "none", "none does not exist"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_is_in(found, path, what="--config")


def test_a_package_is_the_same_for_the_same_contents_and_keeps_what_may_be_run(tmp_path):
    here = made(tmp_path / "here", b__run="#!/bin/sh\n", a="1")
    (here / "b" / "run").chmod(0o755)
    pack(contents_of(here, max_mib=1), tmp_path / "first.zip")
    os.utime(here / "a", (1e9, 1e9))
    pack(contents_of(here, max_mib=1), tmp_path / "second.zip")
    assert (tmp_path / "first.zip").read_bytes() == (tmp_path / "second.zip").read_bytes()
    with zipfile.ZipFile(tmp_path / "first.zip") as file:
        assert file.namelist() == ["a", "b/run"] and file.read("a") == b"1"
        assert file.getinfo("b/run").external_attr >> 16 == 0o755


def git(folder, *words):
    subprocess.run(
        ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True, capture_output=True
    )


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "repository"
    made(folder, training__job="1", training__old__log="2", training__kept="3", training__data__big="4")
    git(tmp_path, "init", "-q", folder)
    write(folder, ".gitignore", "passwords\nold/\nkept\ndata/\n")
    write(folder, ".git/info/exclude", "private\n")
    git(folder, "add", "-f", "training/kept")
    for name in ("passwords", "private"):
        write(folder / "training", name, "secret")
    return folder / "training"


def test_below_the_top_of_a_checkout_what_git_would_not_send_stays(checkout):
    assert names(checkout) == ["job", "kept"]
    write(checkout, ".rayignore", "!data/\njob\n")
    assert names(checkout) == [".rayignore", "data/big", "kept"]


def test_code_travels_with_the_commit_that_it_is_of(checkout, tmp_path):
    git(checkout, "commit", "-qam", "all")
    for _ in range(2):  # the second time an older package's file lies in the folder
        state = git_state(checkout)
        pack(contents_of(checkout, max_mib=1), tmp_path / "code.zip")
        with zipfile.ZipFile(tmp_path / "code.zip") as file:
            file.extractall(tmp_path / "there")
            (checkout / SENT).write_bytes(file.read(SENT))
        assert state["commit"] and git_state(tmp_path / "there") == state


def test_a_checkout_in_the_folder_has_its_own_ignored_files(checkout):
    git(checkout, "init", "-q", checkout / "module")
    made(checkout / "module", a="1", b="2")
    write(checkout / "module", ".gitignore", "b\n")
    assert names(checkout) == ["job", "kept", "module/.gitignore", "module/a"]


def test_a_git_that_does_not_answer_is_an_error_and_not_a_folder_without_one(checkout, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="git cannot list its ignored files"):
        names(checkout)
    assert names(made(checkout.parents[1] / "plain", a="1")) == ["a"]


SECRET = (
    *(".env", ".env.local", "prod.env", ".netrc", "server.PEM", "tls.key", "id_rsa", ".ssh/config", ".git-credentials"),
    *(".npmrc", ".kube/config", ".docker/config.json", "gcp-credentials-2.json", "a.ppk", "a.jks", "a.keystore"),
)


@pytest.mark.parametrize("name", SECRET)
def test_secrets_stay_whatever_ignore_files_say(tmp_path, name):
    made(tmp_path, a="1")
    write(tmp_path, name, "x")
    write(tmp_path, ".rayignore", "!*\n")
    (tmp_path / "harmless").symlink_to(tmp_path / name)
    found = contents_of(tmp_path, max_mib=1)
    assert set(found.files) == {".rayignore", "a"}
    with pytest.raises(ConfigError, match="is named like a secret"):
        check_is_in(found, tmp_path / name, what="--config")
