"""Whole runs that are interrupted and continued, and what is refused: in this process, or killed from outside."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import signal
import stat
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from forked_command import ForkedCommand

import scaleray
from scaleray import Workload
from scaleray.checkpoints.catalog import Catalog
from scaleray.common.fingerprint import environment, environment_hash
from scaleray.config import load_config
from scaleray.data import StepPlan, load_sources
from scaleray.errors import CheckpointError, ConfigError, DataError, RunFailedError, StorageError, TrackingError
from scaleray.launch.run import resume
from scaleray.launch.session.run_folder import RunFolder
from scaleray.recording import store
from scaleray.records.conditions import start_key
from scaleray.records.run_record import RunRecord
from scaleray.training.state.final_weight_files import read_weights

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("mlflow_database")]

ROOT = Path(__file__).parent.parent.parent.parent
STEPS, EVERY, BATCH, ROWS = 90, 10, 24, 310


class Case:
    """A run of a process of its own, in a folder of its own; the same command starts and continues it."""

    def __init__(self, folder, **workload):
        self.folder, self.diary = folder, folder / "diary"
        self.diary.mkdir(parents=True)
        self.config = {
            "workload": {
                "name": "jobs/fault_suite/workload.py:Recorded",
                "args": {"folder": str(self.diary), "pause_s": 0.02, **workload},
            },
            "batch": {"global_size": BATCH},
            "optimizer": {"name": "adamw", "learning_rate": 0.002},
            "schedule": {"name": "cosine"},
            "stop": {"after": f"{STEPS} steps"},
            "evaluation": {"every": "30 steps"},
            "deterministic": True,
            "checkpoint": {"every": f"{EVERY} steps", "storage_path": str(folder / "runs")},
            "tracking": {"uri": f"sqlite:///{folder / 'mlflow.db'}", "every_steps": 1, "interval_s": 0.2},
        }
        (folder / "run.yaml").write_text(yaml.safe_dump(self.config))

    def start(self, *options, environment=None):
        words = ["train", "-c", str(self.folder / "run.yaml"), "--json", *options]
        return ForkedCommand(words, cwd=ROOT, environment=environment)

    def finish(self, *options, environment=None):
        process = self.start(*options, environment=environment)
        output, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
        return RunRecord.from_json(output)

    def interrupt(self, number, *options, at_step, exit_code):
        process = self.start(*options)
        deadline = time.monotonic() + 600
        while max((e["step"] for e in self.entries()), default=0) < at_step:
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.005)
        process.send_signal(number)
        _, errors = process.communicate(timeout=600)
        assert process.returncode == exit_code, errors
        return errors

    def entries(self):
        lines = [
            line for path in self.diary.glob("used-*.jsonl") for line in path.read_text().splitlines(keepends=True)
        ]
        return sorted((json.loads(line) for line in lines if line.endswith("\n")), key=lambda entry: entry["time"])

    def folders(self):
        return sorted((self.folder / "runs").iterdir())


def losses(record):
    with open(Path(record.run_dir) / "steps.csv", newline="") as file:
        return [(int(row["step"]), row["loss"]) for row in csv.DictReader(file)]


def points(record):
    """Every metric of a run in MLflow: (step, value), in the order of the steps."""
    from mlflow import MlflowClient

    client = MlflowClient(record.tracking_uri)
    assert len(client.search_runs([record.experiment_id])) == 1, "one run, whatever happened"
    names = client.get_run(record.run_id).data.metrics
    return {n: sorted((m.step, m.value) for m in client.get_metric_history(record.run_id, n)) for n in names}


def assert_same_run(record, whole):
    """Nothing of an interrupted run tells that it was interrupted."""
    assert record.status == "FINISHED"
    assert losses(record) == losses(whole)
    one, other = (read_weights(r.run_dir) for r in (record, whole))
    assert all(torch.equal(one[name], other[name]) for name in other)
    found, expected = points(record), points(whole)
    for name, values in found.items():
        steps = [step for step, _ in values]
        assert len(steps) == len(set(steps)), f"{name} is doubled"
    for name, values in expected.items():
        # a process that is killed right after a checkpoint may not have told how long that took, a profile is that of the
        # last process, and one that was stopped has told what the run had cost until then
        if not name.startswith(("system/", "point/", "checkpoint/", "profile/", "cost/")):
            assert [step for step, _ in found[name]] == [step for step, _ in values], name
    for name in ("train/loss", "train/learning_rate", "train/epoch", "val/loss"):
        assert found[name] == expected[name]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, empty_database):
    """The run that nobody interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    shutil.copy(empty_database, folder / "mlflow.db")
    return Case(folder).finish("--local")


def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path, whole):
    case = Case(tmp_path)
    case.interrupt(signal.SIGKILL, "--local", "--resume", "auto", at_step=34, exit_code=-signal.SIGKILL)
    case.interrupt(signal.SIGKILL, "--local", "--resume", "auto", at_step=67, exit_code=-signal.SIGKILL)
    record = case.finish("--local", "--resume", "auto")
    assert len(case.folders()) == 1
    assert_same_run(record, whole)
    plan = StepPlan(num_samples=ROWS, global_batch_size=BATCH)
    last = {entry["step"]: entry["ids"] for entry in case.entries()}
    assert [last[step] for step in range(1, STEPS + 1)] == [plan.global_indices(s).tolist() for s in range(STEPS)]


@pytest.mark.combination
def test_sigterm_saves_and_leaves_and_the_run_can_be_resumed(tmp_path, whole):
    case = Case(tmp_path)
    said = case.interrupt(signal.SIGTERM, "--local", at_step=34, exit_code=130)
    assert "stopped; the MLflow run is marked KILLED" in said
    assert "Traceback" not in said
    folder = case.folders()[0]
    assert f"scaleray train --resume {folder}" in said
    killed = RunRecord.read(folder / "record.json")
    assert killed.status == "KILLED"
    record = RunRecord.from_json(_resume_alone(folder))
    assert record.run_id == killed.run_id
    steps = [entry["step"] for entry in case.entries()]
    assert steps == list(range(1, STEPS + 1)), "it left with a checkpoint of its last step, so that none is repeated"
    assert_same_run(record, whole)


def _resume_alone(folder):
    process = ForkedCommand(["train", "--resume", str(folder), "--local", "--json"], cwd=ROOT)
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    return output


@pytest.mark.ray
def test_a_run_goes_on_with_another_number_of_workers(ray_session, tmp_path):
    whole = Case(tmp_path / "whole", plain=True).finish("--local")
    case = Case(tmp_path / "resumed", plain=True)
    case.interrupt(signal.SIGKILL, "--local", at_step=34, exit_code=-signal.SIGKILL)
    environment = {**os.environ, "RAY_ADDRESS": ray_session.address}
    record = case.finish("--resume", str(case.folders()[0]), "--scale.workers", "2", environment=environment)
    assert any("on 2 workers instead of 1" in event for event in record.events)
    for (step, loss), (same, expected) in zip(losses(record), losses(whole), strict=True):
        assert step == same
        assert math.isclose(float(loss), float(expected), rel_tol=1e-4), step
    one, other = (read_weights(r.run_dir) for r in (record, whole))
    for name in other:
        torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-5)
    plan = StepPlan(num_samples=ROWS, global_batch_size=BATCH)
    last = {(entry["step"], entry["rank"]): entry for entry in case.entries()}
    for step in range(1, STEPS + 1):
        ids = last[step, 0]["ids"] + (last[step, 1]["ids"] if last[step, 0]["size"] == 2 else [])
        assert ids == plan.global_indices(step - 1).tolist()
    assert [steps for steps, _ in points(record)["train/loss"]] == list(range(1, STEPS + 1))


class Stumbling(Workload):
    """Linear regression that fails at its 25th step until it is told not to. path: of the data, if not its own."""

    def __init__(self, stumbles: bool = True, path: str = "", rows: int = 64):
        self.stumbles, self.path, self.rows, self.calls = stumbles, path, rows, 0

    def build_model(self):
        return torch.nn.Linear(4, 1)

    def datasets(self):
        x = np.load(self.path) if self.path else np.random.default_rng(0).normal(size=(self.rows, 4)).astype(np.float32)
        return {"train": {"x": x, "y": x.sum(axis=1, keepdims=True)}}

    def loss(self, model, batch):
        self.calls += model.training
        if self.stumbles and self.calls == 25:
            raise RuntimeError("stumbled")
        return (model(batch["x"]) - batch["y"]).pow(2).sum(), len(batch["x"])


def config(tmp_path, **more):
    return {
        "workload.name": "stumbling",
        "batch.global_size": 8,
        "optimizer.learning_rate": 0.01,
        "stop.after": "40 steps",
        "checkpoint.every": "10 steps",
        "checkpoint.storage_path": str(tmp_path / "runs"),
        "tracking.uri": f"sqlite:///{tmp_path / 'mlflow.db'}",
        **more,
    }


def interrupted(tmp_path, *, path="", **more):
    """The folder of a run that failed after its checkpoint of step 20."""
    with pytest.raises(RunFailedError, match="stumbled"):
        scaleray.train(config(tmp_path, **more), Stumbling(path=path), local=True)
    (folder,) = (tmp_path / "runs").iterdir()
    return folder


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.combination
def test_auto_starts_anew_where_nothing_is_unfinished_and_else_takes_the_newest_of_the_same_training(tmp_path):
    settings = config(tmp_path)
    assert resume.find("auto", load_config(flags=settings)) is None
    older = interrupted(tmp_path)
    assert resume.find("auto", load_config(flags=settings)).path == str(older)
    with pytest.raises(RunFailedError):
        scaleray.train(settings, Stumbling(), local=True)
    (newer,) = set((tmp_path / "runs").iterdir()) - {older}
    assert resume.find("auto", load_config(flags=settings)).path == str(newer)
    assert resume.find("auto", load_config(flags={**settings, "optimizer.learning_rate": 0.02})) is None
    record = scaleray.train(settings, Stumbling(stumbles=False), resume="auto", local=True)
    assert record.run_dir == str(newer)
    assert resume.find("auto", load_config(flags=settings)).path == str(older), "the newer one has finished"
    assert resume.find(newer.name, load_config(flags=settings)).path == str(newer), "a run can be named"


@pytest.mark.combination
def test_harmless_changes_are_listed_and_others_refused(tmp_path):
    folder = interrupted(tmp_path)
    before = contents(folder)
    altered = config(tmp_path, **{"optimizer.learning_rate": 0.02, "tracking.every_steps": 5})
    with pytest.raises(ConfigError, match=r"optimizer.learning_rate: 0.01 -> 0.02") as caught:
        scaleray.train(altered, Stumbling(stumbles=False), resume=str(folder), local=True)
    assert caught.value.exit_code == 2
    assert "--allow-change optimizer.learning_rate" in str(caught.value)
    assert contents(folder) == before
    with pytest.raises(ConfigError, match="the config has no such change"):
        scaleray.train(
            config(tmp_path), Stumbling(stumbles=False), resume=str(folder), allow_change=["seed"], local=True
        )
    said = []
    record = scaleray.train(
        altered,
        Stumbling(stumbles=False),
        resume=str(folder),
        allow_change=["optimizer.learning_rate"],
        local=True,
        say=said.append,
    )
    assert record.status == "FINISHED"
    assert "  changed: tracking.every_steps: 10 -> 5" in said
    assert "  changed: optimizer.learning_rate: 0.01 -> 0.02" in said


def test_other_data_is_refused(tmp_path):
    path = tmp_path / "x.npy"
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    np.save(path, x)
    folder = interrupted(tmp_path, path=str(path))
    about = json.loads((folder / "run.json").read_text())
    record = RunRecord.from_json((folder / "record.json").read_text())
    assert about["repeats"] == start_key(record.config, record.workers, record.environment, record.data)
    settings = load_config(flags={**config(tmp_path), "scale.gpus_per_worker": 0.0})  # as the driver decided
    (data,) = load_sources(Stumbling(path=str(path))).values()
    assert Catalog.of_run(str(folder)).newest().facts == {
        "run": folder.name,
        "config": settings.to_dict(),
        "config_hash": settings.hash(),
        "environment_hash": environment_hash({"environment": environment()}),
        "data": {"train": data.describe()["sha256"]},
        "mlflow": {key: about[key] for key in ("run_id", "experiment_id")},
        "metrics": {},
        "evaluated_at": None,
    }
    before = contents(folder)
    np.save(path, x + 1)
    with pytest.raises(DataError, match=r"and the interrupted run read [0-9a-f]{16}"):
        scaleray.train(config(tmp_path), Stumbling(False, str(path)), resume=str(folder), local=True)
    assert contents(folder) == before
    np.save(path, x)
    assert scaleray.train(config(tmp_path), Stumbling(False, str(path)), resume=str(folder), local=True).steps == 40


@pytest.mark.combination
def test_a_run_that_another_process_writes_is_refused(tmp_path):
    folder = interrupted(tmp_path)
    other = RunFolder.reopen(str(folder))  # a lock belongs to an open file: this is as good as another process
    with pytest.raises(StorageError, match="is in use by another process"):
        scaleray.train(config(tmp_path), Stumbling(stumbles=False), resume=str(folder), local=True)
    other.unlock()
    assert scaleray.train(config(tmp_path), Stumbling(stumbles=False), resume=str(folder), local=True).steps == 40


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="is not a run folder"):
        scaleray.train(config(tmp_path), Stumbling(), resume=str(tmp_path), local=True)
    assert not (tmp_path / "run.json").exists()


@pytest.mark.combination
def test_a_password_lands_in_no_file(tmp_path, monkeypatch):
    real, database = store.open_client, f"sqlite:///{tmp_path / 'mlflow.db'}"
    uri = "http://somebody:hunter2@127.0.0.1:9"
    monkeypatch.setattr(store, "check_reachable", lambda uri: None)
    monkeypatch.setattr(store, "open_client", lambda uri: real(database))
    folder = interrupted(tmp_path, **{"tracking.uri": uri})
    files = contents(folder)
    assert {"run.json", "config.yaml", "manifest.json", "record.json"} <= {path.name for path in files}
    assert [path for path, content in files.items() if b"hunter2" in content] == []
    modes = {name: stat.S_IMODE((folder / name).stat().st_mode) for name in ("run.json", "record.json", "config.yaml")}
    assert set(modes.values()) == {0o600}, modes
    with pytest.raises(TrackingError, match="was saved without its password"):
        scaleray.train(None, Stumbling(stumbles=False), resume=str(folder), local=True)
    again = config(tmp_path, **{"tracking.uri": uri})
    record = scaleray.train(again, Stumbling(stumbles=False), resume=str(folder), local=True)
    assert record.status == "FINISHED"
    assert [path for path, content in contents(folder).items() if b"hunter2" in content] == []
