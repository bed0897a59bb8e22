"""`scaleray verify` as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from scaleray.cli.main import run_command

WORKLOAD = """
import numpy as np, torch
from torch import nn


class Good:
    def build_model(self):
        return nn.Linear(4, 3)

    def datasets(self):
        draw = np.random.default_rng(0)
        x = draw.normal(size=(20, 4)).astype(np.float32)
        return {"train": {"x": x, "y": (x > 0).sum(axis=1) % 3}, "val": {"x": x, "y": (x > 0).sum(axis=1) % 3}}

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])


class CountsOne(Good):
    '''Divides by the micro-batch's own size and says that it is a sum over one.'''

    depends_on_micro_batch = True  # else it is refused at the first batch

    def loss(self, model, batch):
        total, count = super().loss(model, batch)
        return total / count, 1


class CalledBack(Good):
    def callbacks(self):
        return [Thaw()]


class Thaw:
    def on_step(self, run):
        if run.step == 6:
            run.model.bias.requires_grad_(False)


class Broken(Good):
    def loss(self, model, batch):
        raise RuntimeError("my own mistake")
"""

CONFIG = """
workload: {name: work.py:Good}
batch: {global_size: 8}
optimizer: {learning_rate: 0.1, clip_norm: 0.5}
stop: {after: 4 epochs}
"""


@pytest.fixture
def folder(tmp_path, mlflow_database, monkeypatch):
    (tmp_path / "work.py").write_text(WORKLOAD)
    (tmp_path / "run.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCALERAY_TRACKING__URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.setenv("SCALERAY_CHECKPOINT__STORAGE_PATH", str(tmp_path / "runs"))
    for module in ("work", "scaleray_workload_work"):
        monkeypatch.delitem(__import__("sys").modules, module, raising=False)
    return tmp_path


def verify(capsys, *words):
    code = run_command(["verify", "-c", "run.yaml", "--local", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("kind", [(), ("--resume",)])
def test_a_pass_says_that_callbacks_may_change_more_after_the_compared_steps(kind, folder, capsys):
    words = ("--workload.name", "work.py:CalledBack", "--world-sizes", "1", "--steps", "4", "--json", *kind)
    code, out, err = verify(capsys, *words)
    assert code == 0, err
    reach = "; 4 steps were compared, and callbacks may act in later steps: see --steps"
    assert json.loads(out)["verdict"].endswith(reach) and reach in err


@pytest.mark.combination
def test_a_resume_is_verified_without_warnings_of_torch(folder):
    words = [sys.executable, "-m", "scaleray", "verify", "-c", "run.yaml", "--local", "--resume", "--steps", "4"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
    assert "ddp x 2" in done.stdout and "find_unused_parameters" not in done.stdout + done.stderr


def test_a_correct_training_passes_and_prints_its_certificate(folder, capsys):
    """With the config's own strategy, `auto`, the certificate is of what it is decided to be: gates asked for ddp in vain."""
    code, out, err = verify(capsys, "--world-sizes", "1,2", "--steps", "5", "--json")
    assert code == 0, err
    certificate = json.loads(out)
    assert certificate["passed"] and certificate["where"] == "gloo processes"
    assert "callbacks" not in certificate["verdict"]
    assert certificate["strategies"] == ["single", "ddp"]
    assert [o["verdict"] for o in certificate["outcomes"]] == ["equal"] * 4
    assert certificate["outcomes"][-1]["comparison"]["parameters"] < 1e-13
    assert "the same training: 4 variants equal one process within 1e-09" in err
    (stored,) = (folder / "runs").glob("verify-good-*/certificate.json")
    written = certificate.pop("written")
    assert written["certificate.json"] == str(stored) and written["folder"] == str(stored.parent)
    assert certificate.pop("summary").startswith("passed: the same training: 4 variants")
    assert json.loads(stored.read_text()) == certificate
    assert "repeats itself to the bit" in (stored.parent / "verification.txt").read_text()


@pytest.mark.combination
def test_a_mismatch_is_explained_and_ends_with_1(folder, capsys):
    code, out, _ = verify(capsys, "--workload.name", "work.py:CountsOne", "--world-sizes", "1", "--steps", "3")
    assert code == 1
    assert "single x 1, 3 micro-batches: loss normalisation. First at step 1: the count of the loss differs" in out
    assert "divided by a count of 3 instead of 1" in out
    assert "not the same training: 1 of 2 variants differ (loss normalisation)" in out


@pytest.mark.combination
def test_a_workload_that_does_not_run_is_bad_usage(folder, capsys):
    code, _, err = verify(capsys, "--workload.name", "work.py:Broken", "--world-sizes", "1")
    assert code == 2
    assert "my own mistake" in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--world-sizes", "3"], ["--world-sizes is 3", "nearest: 2 or 4"]),
        (["--world-sizes", "2,many"], ["2,many", "such as 1,2,4"]),
        (["--strategies", "dpp"], ["dpp", "all, single, ddp"]),
        (["--steps", "0"], ["--steps is 0"]),
        (["--bound", "-1"], ["--bound"]),
        (["--precision", "fp8"], ["fp8"]),
        (["--scale.gpus-per-worker", "1"], ["scale.gpus_per_worker", "gloo processes"]),
        (["--tracking.uri", "http://127.0.0.1:9"], ["MLflow at http://127.0.0.1:9 does not answer"]),
        (["--stpes", "5"], ["stpes", "unknown key"]),
    ],
)
def test_one_message_and_exit_code_2(folder, capsys, options, words):
    code, _, err = verify(capsys, *options)
    assert code == 2
    assert all(word in err for word in words), err
    assert "Traceback" not in err
