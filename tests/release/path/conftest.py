"""A path that has begun, and commands that a stand-in answers as scaleray would."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import scaleray
from scaleray.release.path import commands as of_commands
from scaleray.release.path import endurance
from scaleray.release.path.path_state import start_path
from tests import study_examples

JOB = """
workload: {name: job.py:Job}
batch: {global_size: 8}
optimizer: {learning_rate: 0.1}
stop: {after: 10 steps}
"""


@pytest.fixture
def path(tmp_path, empty_database):
    (tmp_path / "job.py").write_text("class Job:\n    pass\n")
    (tmp_path / "job.yaml").write_text(JOB)
    database = shutil.copy(empty_database, tmp_path / "mlflow.db")
    keys = {"checkpoint.storage_path": str(tmp_path / "runs"), "tracking.uri": f"sqlite:///{database}"}
    return start_path(
        tmp_path / "job.yaml", "test/accuracy >= 0.9", workers=2, runs=2, name="digits", local=True, overrides=keys
    )


class Commands:
    """Answers commands as scaleray would. codes: of the next ones; printed: by the command's first word."""

    def __init__(self):
        self.ran, self.codes, self.printed = [], [], {}

    def __call__(self, words, *, log):
        self.ran.append(list(words))
        code = self.codes.pop(0) if self.codes else 0
        if words[0] == "train":
            folder = Path(words[2]) if "--resume" in words else of_commands.folder_of(words)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "run.json").write_text("{}")
            if code == 0:
                self.train(folder, resumed=[2] if "--resume" in words else [])
            return code, {"written": {"folder": str(folder)}}, "Error: it broke"
        return code, {"written": {"folder": f"/{words[0]}"}, **self.printed.get(words[0], {})}, "its last words"

    def train(self, folder, resumed=()):
        speed = 100.0 + int(folder.name.rpartition("-")[2])
        record = study_examples.run_record(
            name=folder.name, samples_per_s=speed, run_dir=str(folder), metrics={"test/accuracy": 0.95},
            resumed_after=list(resumed), steps=40,
        )  # fmt: skip
        (folder / "record.json").write_text(record.to_json())
        (folder / "steps.csv").write_text(study_examples.steps_csv(40))


@pytest.fixture
def commands(monkeypatch):
    answering = Commands()
    monkeypatch.setattr(of_commands, "run_command", answering)

    def killed(words, folder, log):
        folder.mkdir(parents=True)
        (folder / "run.json").write_text("{}")
        return True

    monkeypatch.setattr(endurance, "_killed", killed)
    return answering


def to_the_gates(path):
    scaleray.next_on_path(path.folder, until="produce")
    scaleray.skip_on_path("optimise/decide", "no", name=path.folder)
