"""The image: what hadolint says, versions, and what goes into it."""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from cluster_files import CLUSTER, ROOT
from optional_programs import needs, program

from scaleray.clusters.manifests import file_versions

FOLDER = CLUSTER / "image"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
COPIED = [words.split()[:-1] for words in re.findall(r"^COPY (.*)$", DOCKERFILE, re.M)]


def test_hadolint_finds_nothing():
    found = subprocess.run(
        [program("hadolint"), "--no-color", str(FOLDER / "Dockerfile")], capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0 and not found.stdout, found.stdout


def test_the_base_has_the_python_of_the_table_and_the_packages_those_of_the_constraints():
    assert f"ARG BASE=python:{file_versions.PYTHON}-slim-{file_versions.DEBIAN}\n" in DOCKERFILE
    assert "constraints.txt" in DOCKERFILE
    steps = (FOLDER / "install.sh").read_text()
    assert steps.count("pip install") == steps.count("--constraint ") == 2
    assert not re.search(r"pip install[^\n]*\b(ray|torch)[\[=<>]", steps)  # no version beside constraints.txt


def test_the_extras_of_the_image_exist():
    [extras] = re.findall(r"EXTRAS=\$\{EXTRAS:-(.*)\}", (FOLDER / "install.sh").read_text())
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= set(known) and "train" in extras.split(",")


def test_nothing_runs_as_root_and_nothing_is_added_from_elsewhere():
    lines = [line for line in DOCKERFILE.splitlines() if line and not line.startswith("#")]
    users = [line for line in lines if line.startswith("USER")]
    assert users == ["USER 1000:1000"]
    assert [line.split()[0] for line in lines[lines.index(users[0]) :]] == [
        "USER",
        "ENV",
        "WORKDIR",
        "ENTRYPOINT",
        "CMD",
    ]
    assert "ADD " not in DOCKERFILE and "latest" not in DOCKERFILE and "curl" not in DOCKERFILE


def test_what_is_copied_is_there_and_not_ignored():
    rules = [
        line
        for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert rules[0] == "*"
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    sources = {source for copied in COPIED for source in copied}
    assert sources == allowed and all((ROOT / source).exists() for source in sources)
    assert all(
        fnmatch.fnmatch(name, pattern)
        for name, pattern in (("a/__pycache__", "**/__pycache__"), ("a/b.pyc", "**/*.pyc"))
    )


def test_the_requirements_are_a_layer_of_their_own_below_the_code():
    order = [
        DOCKERFILE.index(words)
        for words in (
            "install.sh system",
            "install.sh requirements",
            "COPY scaleray",
            "install.sh scaleray",
            "COPY jobs",
        )
    ]
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("words", "becomes"),
    [
        ("train -c x.yaml", "scaleray train -c x.yaml"),
        ("scaleray plan", "scaleray plan"),
        ("bash -c true", "bash -c true"),
    ],
)
def test_the_entry_point_starts_scaleray_unless_told_otherwise(tmp_path, words, becomes):
    (tmp_path / "tini").write_text('#!/bin/bash\necho "$@"\n')
    (tmp_path / "tini").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        [str(FOLDER / "entrypoint.sh"), *words.split()], env=environment, capture_output=True, text=True, timeout=30
    )
    assert done.stdout.strip() == f"-s -g -- {becomes}"
    environment["HOME"] = str(tmp_path / "nowhere")
    done = subprocess.run(
        [str(FOLDER / "entrypoint.sh"), "true"], env=environment, capture_output=True, text=True, timeout=30
    )
    assert f"the home folder {tmp_path}/nowhere cannot be written" in done.stderr


@needs("debootstrap")
@pytest.mark.timeout(2400)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_steps_of_the_image_run_in_a_clean_root():
    done = subprocess.run(
        [str(FOLDER / "try_in_a_clean_root.sh")], cwd=ROOT, capture_output=True, text=True, timeout=2300
    )
    assert done.returncode == 0 and done.stdout.strip().endswith("all is well"), (
        done.stdout[-4000:] + done.stderr[-4000:]
    )
