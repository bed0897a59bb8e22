"""A command that dies without a word, by SIGKILL or with its Ray: its guard says so, marks the run, and removes the rest."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from scaleray.launch.cluster import driver_guard, left_open
from scaleray.recording.store import RunStore, mark_left_running

WORKLOADS = Path(__file__).parent.parent / "workloads.py"


def statuses(tmp_path):
    with sqlite3.connect(f"file:{tmp_path / 'mlflow.db'}?mode=ro", uri=True) as database:
        return [status for (status,) in database.execute("select status from runs")]


def start(tmp_path, command, *words, workload=f"{WORKLOADS}:Endless"):
    options = {
        "workload.name": workload,
        "workload.args.marker": tmp_path / "marker",
        "batch.global-size": 16,
        "optimizer.learning-rate": 0.01,
        "tracking.uri": f"sqlite:///{tmp_path / 'mlflow.db'}",
        "checkpoint.storage-path": tmp_path / "runs",
        "scale.gpus-per-worker": 0,
        "stop.after": "1000000 steps",
    }
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with open(tmp_path / "output", "w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "scaleray", command, *words]
            + [word for key, value in options.items() for word in (f"--{key}", str(value))],
            stdout=output,
            stderr=output,
            cwd=tmp_path,
            env=environment,
        )


def said(tmp_path):
    return (tmp_path / "output").read_text()


def wait_for_the_guard(family):
    wait_until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family), seconds=120)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("mlflow_database")
def test_the_raylet_of_a_run_is_killed(tmp_path):
    """Ray's core ends the driver; before, MLflow had the run as RUNNING for ever and its folder in /tmp stayed."""
    driver = start(tmp_path, "train", "--tracking.run-name", "lost")
    wait_until(lambda: (tmp_path / "marker").exists() or driver.poll() is not None, seconds=200)
    family = psutil.Process(driver.pid).children(recursive=True)
    raylet = next(process for process in family if process.name() == "raylet")
    folder = Path(raylet.environ()["WORKER_TEMPLATE_SOCKET"]).parent
    assert folder.exists()
    raylet.kill()
    assert driver.wait(timeout=120) == 1
    wait_for_the_guard(family)
    assert "ended before it was done: the raylet of its own Ray ended" in said(tmp_path)
    assert f"to continue: scaleray train --resume {tmp_path / 'runs' / 'lost'}" in said(tmp_path)
    assert said(tmp_path).count("RunFailedError") == 1
    assert statuses(tmp_path) == ["FAILED"]
    assert not folder.exists()


@pytest.mark.combination
@pytest.mark.parametrize("command", ["train", "study"])
@pytest.mark.usefixtures("mlflow_database")
def test_a_command_without_ray_is_killed(tmp_path, command):
    words = {"train": [], "study": ["--world-sizes", "1", "--steps", "100000"]}[command]
    driver = start(tmp_path, command, "--local", *words)
    wait_until(lambda: (tmp_path / "marker").exists() or driver.poll() is not None, seconds=120)
    assert statuses(tmp_path) == ["RUNNING"], said(tmp_path)
    family = psutil.Process(driver.pid).children(recursive=True)
    driver.kill()
    driver.wait(timeout=60)
    wait_for_the_guard(family)
    assert f"scaleray {command} ended before it was done: its process ended without a message" in said(tmp_path)
    assert statuses(tmp_path) == ["FAILED"]


def test_an_agent_whose_raylet_has_ended_is_found_by_its_log(tmp_path):
    """Its title had replaced its environment, and it was nobody's descendant: one was left after its GCS was killed."""
    logs = tmp_path / "logs"
    logs.mkdir()
    agent = "import sys, time; log = open(sys.argv[1], 'w'); open('/proc/self/comm', 'w').write('ray::Agent'); time.sleep(300)"
    ours, theirs = (
        subprocess.Popen([sys.executable, "-c", agent, folder / "agent.log"]) for folder in (logs, tmp_path)
    )
    try:
        wait_until(lambda: all(psutil.Process(one.pid).name() == "ray::Agent" for one in (ours, theirs)))
        left_open.end_processes(str(tmp_path / "none"), str(logs))
        assert not psutil.pid_exists(ours.pid) and theirs.poll() is None
    finally:
        for process in (ours, theirs):
            process.kill()
            process.wait()


def test_a_good_end_and_an_exception_say_nothing(capfd):
    facts = {"command": "c", "folder": "/nonexistent", "hint": "", "uri": "", "experiment": ""}
    guards = []

    def fail():
        with driver_guard.guarding(**facts):
            guards.extend(driver_guard._guards)
            driver_guard.note(key="k")
            raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        fail()
    assert [guard.returncode for guard in guards] == [0]
    assert not driver_guard._guards
    assert capfd.readouterr() == ("", "")


def test_only_a_run_that_is_left_running_is_marked(tmp_path, mlflow_database):
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    run = RunStore.create(uri, experiment="e", run_name="r", tags={}, key="k")
    ask = {"status": "FAILED", "reason": "it died", "experiment": "e"}
    assert not mark_left_running(uri, "another", **ask)
    assert mark_left_running(uri, "k", **ask)
    assert run.tags("scaleray.verdict") == {"scaleray.verdict": "it died"}
    run.client.set_terminated(run.run_id, "KILLED")
    assert not mark_left_running(uri, "k", **ask)
    assert run.client.get_run(run.run_id).info.status == "KILLED"


SLOW_DATA = """
import pathlib, time
from scaleray import Workload

class Slow(Workload):
    def __init__(self, marker): self.marker = marker
    def build_model(self): ...
    def loss(self, model, batch): ...
    def datasets(self):
        pathlib.Path(self.marker).touch()
        time.sleep(600)
"""


@pytest.mark.always("15-")
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGTERM, ["--local"]),
        (signal.SIGINT, ["--local"]),
        pytest.param(signal.SIGTERM, [], marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("mlflow_database")
def test_a_signal_before_there_is_a_run_neither_blames_the_users_code_nor_claims_a_run(tmp_path, number, words):
    """ "datasets() is failing: SystemExit: 15" with a stack of C++, and "the MLflow run is marked KILLED"."""
    (tmp_path / "slow.py").write_text(SLOW_DATA)
    command = start(tmp_path, "train", *words, workload=f"{tmp_path / 'slow.py'}:Slow")
    wait_until(lambda: (tmp_path / "marker").exists() or command.poll() is not None, seconds=120)
    command.send_signal(number)
    assert command.wait(timeout=60) == 130
    lines = said(tmp_path).splitlines()
    assert lines[-1] == "stopped", lines
    assert "datasets()" not in said(tmp_path) and "SIGTERM received" not in said(tmp_path)


def test_sigterm_ends_a_command_that_ignores_sigint_as_a_background_job_of_a_script_does():
    code = (
        "import time; from scaleray.common.stop_signals import sigterm_like_ctrl_c\n"
        "with sigterm_like_ctrl_c():\n    print('here', flush=True)\n    time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    ) as command:
        assert command.stdout.readline() == "here\n"
        command.send_signal(signal.SIGTERM)
        assert "KeyboardInterrupt" in command.communicate(timeout=60)[1]
