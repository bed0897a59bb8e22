"""A project to submit, clusters by name, and programs that stand in for kubectl, ssh and Slurm's."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """A folder with a space in its name, as users have."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    return folder


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a workload and its config, as the current one; no cluster and no token in the environment."""
    folder = tmp_path / "project"
    (folder / "jobs").mkdir(parents=True)
    (folder / "jobs" / "work.py").write_text(
        "import sklearn\nfrom scaleray import Workload\n\nclass Mine(Workload): ...\n"
    )
    (folder / "jobs" / "work.yaml").write_text(
        "workload: {name: jobs/work.py:Mine}\nbatch: {global_size: 8}\noptimizer: {learning_rate: 0.1}\nstop: {after: 1 epochs}\n"
    )
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    return folder


@pytest.fixture
def clusters(project):
    """Write the user's file of clusters."""

    def write(**sections: Any) -> None:
        folder = project.parent / "settings" / "scaleray"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "clusters.yaml").write_text(yaml.safe_dump(sections))

    return write


STAND_IN = (Path(__file__).parent / "stand_in.py").read_text()


class StandIns:
    """Programs that note how they are called, and answer what the first fitting line of `answers` says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        self._answers: list[list[Any]] = []
        self._write()

    def add(self, *names: str) -> None:
        """Put programs of these names on the path."""
        for name in names:
            path = self.bin / name
            # not its first line: none can name a Python in a folder with a space
            path.write_text(f"#!/bin/sh\n'''exec' {shlex.quote(sys.executable)} -IS \"$0\" \"$@\"\n' '''\n{STAND_IN}")
            path.chmod(0o755)

    def answer(self, pattern: str, out: Any = "", *, code: int = 0, err: str = "", times: int = 0) -> None:
        """What is said to words that the pattern is found in. times: how often; 0 is always."""
        self._answers.append([pattern, times, code, out if isinstance(out, str) else json.dumps(out), err])
        self._write()

    def first(self, pattern: str, out: Any = "", *, code: int = 0, err: str = "", times: int = 0) -> None:
        """The same, before all others."""
        self.answer(pattern, out, code=code, err=err, times=times)
        self._answers.insert(0, self._answers.pop())
        self._write()

    @property
    def calls(self) -> list[tuple[str, list[str], str, dict[str, str]]]:
        """Name, words, what was read and the environment of each call."""
        path = self.folder / "calls"
        return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []

    def words(self, part: str = "") -> list[str]:
        """The calls that hold a part, as lines."""
        lines = [" ".join([name, *words]) for name, words, *_ in self.calls]
        return [line for line in lines if part in line]

    def _write(self) -> None:
        for used in self.folder.glob("used*"):
            used.unlink()
        (self.folder / "answers").write_text(json.dumps(self._answers))


@pytest.fixture
def stand_ins(project, monkeypatch):
    """Stand-ins on the path, which has neither kubectl nor Slurm otherwise; nothing sleeps."""
    made = StandIns(project.parent / "stand_ins")
    plain = project.parent / "plain"
    plain.mkdir()
    for name in ("bash", "cat", "mkdir", "rm", "tail", "test", "touch", "grep", "head", "python3"):
        found = next((Path(f"{one}/{name}") for one in ("/usr/bin", "/bin") if Path(f"{one}/{name}").exists()), None)
        if found is not None:
            (plain / name).symlink_to(found)
    monkeypatch.setenv("PATH", f"{made.bin}{os.pathsep}{plain}")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    return made
