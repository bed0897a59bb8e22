"""What a result was measured on: complete enough to compare runs, and without anything private."""

import json
import subprocess

import pytest

from scaleray.common.fingerprint import environment, environment_hash, package_versions
from scaleray.common.git_state import SENT, git_state, state_to_send


def git(folder, *words):
    command = ["git", "-c", "user.name=Someone", "-c", "user.email=someone@example.org", "-C", str(folder), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    git(tmp_path, "init", "--quiet")
    (tmp_path / "recipe.py").write_text("lr = 0.1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "a recipe")
    return tmp_path


def test_a_clean_checkout_is_its_commit(checkout):
    assert git_state(checkout) == {"commit": git(checkout, "rev-parse", "HEAD"), "is_dirty": False, "diff_sha256": None}


def test_changes_that_are_not_committed_have_a_hash_that_follows_them(checkout):
    (checkout / "recipe.py").write_text("lr = 0.2\n")
    first = git_state(checkout)
    (checkout / "recipe.py").write_text("lr = 0.3\n")
    second = git_state(checkout)
    assert first["is_dirty"] and second["is_dirty"]
    assert first["diff_sha256"] != second["diff_sha256"]
    git(checkout, "add", ".")  # staged or not makes no difference
    assert git_state(checkout)["diff_sha256"] == second["diff_sha256"]


def test_a_new_file_makes_a_checkout_dirty_and_its_content_counts(checkout):
    (checkout / "new.py").write_text("a = 1\n")
    first = git_state(checkout)
    (checkout / "new.py").write_text("a = 2\n")
    assert first["is_dirty"]
    assert git_state(checkout)["diff_sha256"] != first["diff_sha256"]


def test_a_large_new_file_counts_by_its_size(checkout, monkeypatch):
    monkeypatch.setattr("scaleray.common.git_state.LARGEST_HASHED_BYTES", 3)
    digests = []
    for content in ("12345", "54321", "123456"):
        (checkout / "data.bin").write_text(content)
        digests.append(git_state(checkout)["diff_sha256"])
    assert digests[0] == digests[1] != digests[2]


def test_outside_of_a_checkout_the_commit_is_what_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    assert git_state(tmp_path) == git_state(tmp_path / "nowhere") == {}
    monkeypatch.setenv("GIT_COMMIT", "abc123")
    assert git_state(tmp_path) == {"commit": "abc123", "is_dirty": None, "diff_sha256": None}


def test_a_package_has_the_state_of_its_sender_until_its_files_change(checkout, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("GIT_COMMIT", "abc123")
    package = tmp_path_factory.mktemp("package")
    for text in ("lr = 0.1\n", "lr = 0.2\n"):
        (checkout / "recipe.py").write_text(text)
        (package / "recipe.py").write_text(text)
        (package / SENT).write_text(state_to_send(checkout, ["recipe.py"]))
        assert git_state(package / "jobs") == git_state(checkout) and git_state(checkout)["is_dirty"] == ("2" in text)
    git(checkout, "commit", "-qam", "another")
    (package / SENT).write_text(state_to_send(checkout, ["recipe.py"]))
    (package / "recipe.py").write_text("lr = 0.3\n")
    (package / "log").write_text("written by the job")
    found = git_state(package)
    assert found["commit"] == git(checkout, "rev-parse", "HEAD") and found["is_dirty"] and found["diff_sha256"]
    (package / SENT).write_text("[]")
    assert git_state(package)["commit"] == "abc123"


def test_a_file_of_an_old_package_does_not_count_in_a_checkout(checkout):
    (checkout / SENT).write_text(
        state_to_send(checkout, ["recipe.py"]).replace(git(checkout, "rev-parse", "HEAD"), "feed")
    )
    assert git_state(checkout)["commit"] == git(checkout, "rev-parse", "HEAD") and git_state(checkout)["is_dirty"]


def test_the_environment_names_code_packages_and_hardware():
    facts = environment()
    assert {"git", "python", "packages", "os", "cpu", "memory_gib", "accelerators"} == set(facts)
    assert {"scaleray", "torch", "numpy", "ray", "mlflow"} <= set(package_versions())
    assert facts["cpu"]["threads"] >= 1 and facts["cpu"]["model"] and facts["memory_gib"] > 0
    assert json.loads(json.dumps(facts)) == facts


def test_no_environment_variable_is_stored(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do-not-store-me")
    assert "do-not-store-me" not in json.dumps(environment())


def test_the_hash_tells_environments_apart_whatever_the_order_of_their_facts():
    facts = {"python": "3.11", "packages": {"torch": "2.13", "numpy": "2"}}
    reordered = {"packages": {"numpy": "2", "torch": "2.13"}, "python": "3.11"}
    assert environment_hash(facts) == environment_hash(reordered)
    assert len(environment_hash(facts)) == 16
    assert environment_hash({**facts, "python": "3.12"}) != environment_hash(facts)
