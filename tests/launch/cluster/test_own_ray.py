"""The folders of a Ray that a command has started for itself: gone after a good end, kept for a while after another."""

import os
import subprocess
import sys

import pytest
import ray

from scaleray.checkpoints.storage import Store, remove_parts
from scaleray.launch.cluster import own_ray


@pytest.fixture
def session(tmp_path, monkeypatch):
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    folder = tmp_path / f"session_2026-01-01_00-00-00_000000_{os.getpid()}"
    (folder / "logs").mkdir(parents=True)
    (tmp_path / "session_latest").symlink_to(folder)
    monkeypatch.setattr(own_ray, "_session", str(folder))
    return folder


def test_a_session_is_removed_after_a_good_end(session):
    """One of 0.3 MB stayed for every run."""
    own_ray.stop()
    assert list(session.parent.iterdir()) == []


def test_logs_of_a_session_that_failed_are_kept_for_a_while(session):
    old, other = (session.parent / f"session_2025-01-01_00-00-00_000000_{pid}" for pid in (2**22 + 1, 1))
    for folder in (old, other):  # the process of one is gone, of the other it lives
        folder.mkdir()
        os.utime(folder, (0, 0))
    own_ray.stop(keeps_logs=True)
    assert (session / "logs").is_dir() and (session.parent / "session_latest").exists()
    assert not old.exists() and other.exists()


def test_the_folder_that_a_user_has_chosen_is_left_alone(session, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", "/elsewhere")
    own_ray.stop()
    assert session.exists()


def test_parts_of_files_that_a_killed_process_left_are_removed_and_nothing_else(tmp_path):
    store = Store(str(tmp_path))
    for name in ("goodput.json", "hangs/1/rank-0.json", "mine.part", "a.12345678.parts"):
        store.write_text(name, "x")
        (tmp_path / f"{name}.0123abcd.part").write_text("y")
    remove_parts(tmp_path)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["a.12345678.parts", "goodput.json", "hangs/1/rank-0.json", "mine.part"]


HOOKS = """
import importlib, os, traceback
import scaleray.launch.cluster.connection, ray
def noted(**hooks):
    if {"before", "after_in_parent"} & set(hooks):
        print(traceback.extract_stack(limit=2)[0].filename)
os.register_at_fork = noted
for name in ("scaleray.launch.run.train", "ray.train.torch"):
    importlib.import_module(name)
"""


def test_nothing_that_is_imported_while_ray_starts_adds_a_hook_around_forks():
    """One that is added between the two halves of a fork releases a lock that it has not taken: "Exception ignored ...
    release unlocked lock", in 3 of 83 starts."""
    found = subprocess.run([sys.executable, "-c", HOOKS], capture_output=True, text=True, check=True)
    assert found.stdout == ""
