"""`scaleray study` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scaleray.cli.main import run_command
from scaleray.cli.study import command_of
from scaleray.studies.study_options import StudyOptions

CONFIG = """
workload: {name: work.py:Line}
batch: {global_size: 8}
optimizer: {learning_rate: 0.1}
stop: {after: 4 epochs}
study: {price_per_worker_hour: 1.5, currency: EUR}
"""
WORKLOAD = """
import numpy as np
from torch import nn


class Line:
    def build_model(self):
        return nn.Linear(4, 3)

    def datasets(self):
        x = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
        return {"train": {"x": x, "y": (x > 0).sum(axis=1) % 3}}

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])
"""


@pytest.fixture
def folder(tmp_path, monkeypatch, uri):
    (tmp_path / "work.py").write_text(WORKLOAD)
    (tmp_path / "run.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCALERAY_TRACKING__URI", uri)
    monkeypatch.setenv("SCALERAY_CHECKPOINT__STORAGE_PATH", str(tmp_path / "runs"))
    for module in ("work", "scaleray_workload_work"):
        monkeypatch.delitem(__import__("sys").modules, module, raising=False)
    return tmp_path


def test_a_study_prints_its_table_and_where_everything_is_and_the_record_as_json(folder, capsys):
    words = [
        "study",
        "-c",
        "run.yaml",
        "--world-sizes",
        "1",
        "--repeats",
        "1",
        "--steps",
        "4",
        "--seconds",
        "0",
        "--local",
    ]
    assert run_command([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    (point,) = record["curves"][0]["points"]
    assert point["point"]["workers"] == 1 and len(point["point"]["turns"]) == 1
    assert (
        record["command"]
        == "scaleray study -c run.yaml --world-sizes 1 --mode strong --repeats 1 --steps 4 --seconds 0 --local"
    )
    assert "EUR per" in err  # a column of the table, broken where it must be
    *_, report, kept = err.strip().splitlines()
    page = Path(report.partition(": ")[2].strip())
    assert page.name == "report.html" and page.exists()
    assert Path(kept.split()[-1]).name == "record.json"
    # the same again needs no worker, and says whose points these are
    assert run_command(words) == 0
    assert f"reused from {record['name']}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--world-sizes", "1,two"], "comma-separated list of whole numbers"),
        (["--world-sizes", ""], "--world-sizes"),
        (["--world-sizes", "1,3", "--oversubscribe"], "nearest: 6 or 9"),
        (["--world-sizes", "1,256", "--batch.global-size", "256"], "256"),
        (["--mode", "diagonal"], "strong, weak, or both"),
        (["--repeats", "0"], "--repeats"),
        (["--steps", "1"], "--steps"),
        (["--seconds", "-1"], "--seconds"),
        (["--to-target"], "stop.at"),
        (["--points-of", "nowhere"], "--points-of"),
        (["--study.price-per-worker-hour", "-3"], "study.price_per_worker_hour"),
        (["--study.peak-tflops", "0"], "study.peak_tflops"),
        (["--workload.name", "work.py:Missing"], "Missing"),
    ],
)
def test_a_slip_costs_one_message_and_exit_code_2(folder, capsys, words, message):
    assert run_command(["study", "-c", "run.yaml", "--local", *words]) == 2
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err
    assert not list(folder.glob("runs/study-*"))


def test_more_workers_than_cores_are_refused_with_three_ways_out(folder, capsys):
    (folder / "work.py").write_text(WORKLOAD.replace("(20, 4)", "(4096, 4)"))
    words = ["--world-sizes", "1,4096", "--batch.global-size", "4096"]
    assert run_command(["study", "-c", "run.yaml", "--local", *words]) == 2
    err = capsys.readouterr().err
    assert all(
        way in err for way in ("workers that share a core give no valid measurement", "emulated", "--oversubscribe")
    )


def test_the_command_that_repeats_a_study_holds_no_password():
    options = StudyOptions(mode="weak", to_target=True, noise=True, oversubscribe=True, points_of=("old",), force=True)
    command = command_of(Path("a b.yaml"), ("--tracking.uri", "http://me:secret@host/"), options)
    assert "secret" not in command and "me:***@host" in command
    assert command.startswith(
        "scaleray study -c 'a b.yaml' --world-sizes 1,2 --mode weak --repeats 5 --to-target --noise --oversubscribe"
    )
