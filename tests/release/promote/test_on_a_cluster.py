"""From `scaleray cluster up` through a study, gates and promotion to an answer by HTTP, with a user's commands alone."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from listening import MARK, processes
from waiting import wait_until

from scaleray.launch.cluster.own_ray import free_port
from tests.models.conftest import WORKLOAD
from tests.recording.test_real_server import stop_server
from tests.release.promote.test_served import asked, start

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[3]
ROWS = {"x": np.eye(4, dtype=np.float32)}
CONFIG = """
workload: {name: "corners.py:Named"}
batch: {global_size: 8}
optimizer: {learning_rate: 0.02}
stop: {after: 3 epochs}
evaluation: {every: 1 steps}
scale: {workers: 2, cpus_per_worker: 1}
checkpoint: {storage_path: runs}
tracking: {experiment: corners, system_metrics: false}
"""
POLICY = """
scaling: {min_efficiency: 0.001}
convergence: {target: val/accuracy >= 0.5, margin: 0.9, metric_margin: 0.9, alpha: 0.4, min_runs: 2}
"""
"""Bounds for two short trainings on a machine that others may load; all that is no measurement is asked as by default."""


class User:
    """A user of this machine who has never used Ray, in a checkout of their own."""

    def __init__(self, home):
        self.home, self.mark = home, f"{os.getpid()}-{time.monotonic_ns()}"
        own = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SCALERAY_", "MLFLOW_", "GIT_"))}
        self.environment = {
            **own, "HOME": str(home), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(home / ".cache"), "PYTHONPATH": str(ROOT), MARK: self.mark,
            "MLFLOW_TRACKING_URI": f"sqlite:///{home}/mlflow.db", "SCALERAY_TRACKING__URI": f"sqlite:///{home}/mlflow.db",
        }  # fmt: skip

    def scaleray(self, *words, code=0):
        return self._done([sys.executable, "-m", "scaleray", *words], code)

    def git(self, *words):
        return self._done(["git", "-c", "user.name=A", "-c", "user.email=a@b", *words])

    def _done(self, words, code=0):
        done = subprocess.run(
            words, env=self.environment, cwd=self.home, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == code, (words, done.stdout[-4000:], done.stderr[-4000:])
        return done.stdout

    def json(self, *words):
        return json.loads(self.scaleray(*words, "--json"))


@pytest.fixture
def user(tmp_path):
    """One whose processes are gone afterwards, in any case."""
    found = User(tmp_path)
    yield found
    for process in processes(found.mark):
        process.kill()


def test_a_cluster_of_the_project_is_enough_to_promote_and_serve_a_model(user):
    for name, text in (("corners.py", WORKLOAD), ("job.yaml", CONFIG), ("policy.yaml", POLICY), (".gitignore", "*")):
        (user.home / name).write_text(text)
    user.git("init", "-q")
    user.git("add", "-f", "corners.py", "job.yaml")
    user.git("commit", "-q", "-m", "corners: a first workload")

    name = f"p{os.getpid()}"
    user.scaleray("cluster", "up", name, "--nodes", "2", "--cpus", "2")
    exported = shlex.split(user.scaleray("cluster", "status", name, "--export"))
    user.environment |= dict(word.split("=", 1) for word in exported if "=" in word)

    study = user.json("study", "-c", "job.yaml", "--repeats", "3", "--seconds", "0.5")
    runs = [
        user.json("train", "-c", "job.yaml", "--seed", str(seed), "--scale.workers", workers, "--no-report", "--tracking.run-name",
                  f"of-{workers}-{seed}")
        for seed, workers in ((0, "2"), (1, "2"), (2, "1"), (3, "1"))
    ]  # fmt: skip
    user.scaleray("verify", "-c", "job.yaml", "--steps", "6", "--accumulation", "1")
    candidates, baselines = ([run["run_dir"] for run in side] for side in (runs[:2], runs[2:]))
    promoted = user.json(
        "promote", *candidates, "--as", "champion", "--against", *baselines, "--study", study["folder"],
        "--policy", "policy.yaml",
    )  # fmt: skip
    assert promoted, promoted

    (user.home / "rows.jsonl").write_text("".join(json.dumps({"x": row.tolist()}) + "\n" for row in ROWS["x"]))
    user.scaleray("predict", "models:/corners@champion", "--data", "rows.jsonl", "--out", "answers.jsonl")
    predicted = [json.loads(line) for line in (user.home / "answers.jsonl").read_text().splitlines()]
    port = free_port()
    words = ["models", "serve", "-m", "models:/corners@champion", "--env-manager", "local", "--port", str(port)]
    server = start(words, user.home / "serve.log", f"http://127.0.0.1:{port}/ping", **user.environment)
    try:
        served = asked(port, ROWS)
    finally:
        stop_server(server)
    assert served == {key: [row[key] for row in predicted] for key in ("corner", "name")}

    user.scaleray("promote", "--verify", "corners@champion")
    user.scaleray("cluster", "down", name)
    wait_until(lambda: not processes(user.mark), seconds=60)
    assert "no cluster" in user.scaleray("cluster", "status", name, code=1)
