"""What a result was measured on: complete enough to compare runs, and without anything private."""

import json
import subprocess

import pytest

from scaleray.common.fingerprint import environment, environment_hash, git_state, package_versions


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
    monkeypatch.setattr("scaleray.common.fingerprint.LARGEST_HASHED_BYTES", 3)
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
