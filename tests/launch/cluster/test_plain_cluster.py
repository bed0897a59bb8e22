"""A run on a cluster that `ray start` has started, as most clusters are: its workers are forks nevertheless."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading

import psutil
import pytest
from waiting import wait_until

from scaleray.common.guarded import guarded
from scaleray.common.own_folder import plain_executable
from scaleray.launch.cluster import worker_template
from scaleray.launch.cluster.own_ray import free_port

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(not worker_template.is_possible(), reason="workers are forked on Linux only"),
]

CONNECT = """
import contextlib, json, os, sys, time
import psutil
from scaleray.config import RunConfig
from scaleray.launch.cluster.connection import connected, workers_inherit

given = {"workload": {"name": "nothing.py:Nothing"}, "batch": {"global_size": 2}, "stop": {"after": "1 step"}}
with connected(RunConfig.model_validate(given | {"optimizer": {"learning_rate": 0.1}, "scale": {"workers": 2}})):
    import ray

    @ray.remote(num_cpus=0)
    class Actor:
        def about(self):
            process = psutil.Process()
            return {
                "parent": " ".join(process.parent().cmdline()), "has_group": os.getpgrp() == process.pid,
                "started_at": process.create_time(), "imported": "scaleray.training.loop" in sys.modules,
                "pid": process.pid, "watcher": os.environ.get("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"),
                "mine": os.environ.get("RAY_TRAIN_MINE"),
            }

    def idle():
        found = []
        for process in psutil.Process().children(recursive=True):  # forks of this driver's template
            with contextlib.suppress(psutil.Error):
                found += process.cmdline()
        return any(word.startswith("ray::IDLE") for word in found)

    while sys.argv[1] == "waits" and not idle():
        time.sleep(0.2)
    asked_at = time.time()
    print(json.dumps(ray.get(Actor.remote().about.remote()) | {"asked_at": asked_at, "inherits": workers_inherit()}))
"""


@pytest.fixture(scope="module")
def plain_head():
    """Address of a head that Ray's own command line has started."""
    folder = worker_template.short_folder()
    port, others = free_port(), [f"--{name}-port={free_port()}" for name in ("dashboard", "ray-client-server")]
    command = [plain_executable(), "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    words = [f"--port={port}", *others, "--num-cpus=4", f"--object-store-memory={2**28}", f"--temp-dir={folder}/ray"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    head = subprocess.Popen(
        guarded([*command, "--node-ip-address=127.0.0.1", *words]),
        env={**environment, "RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert any("Ray runtime started" in line for line in iter(head.stdout.readline, ""))
        threading.Thread(target=head.stdout.read, daemon=True).start()  # or a full pipe would stop it
        yield f"127.0.0.1:{port}"
    finally:
        head.terminate()
        head.wait()


def connect(address, *, waits, **variables):
    """What an actor of a driver on that head finds, and the driver's process group. waits: for a worker without a
    use."""
    environment = {**os.environ, "RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled", **variables}
    if "RAY_AUTH_TOKEN" in variables:
        del environment["RAY_AUTH_MODE"]
    driver = subprocess.Popen(
        [sys.executable, "-c", CONNECT, "waits" if waits else ""], env=environment, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    output, _ = driver.communicate(timeout=300)
    assert driver.returncode == 0
    return json.loads(output.splitlines()[-1]), driver.pid


@pytest.mark.timeout(400)
def test_workers_are_forks_that_start_before_they_are_needed_and_end_with_their_driver(plain_head):
    found, driver = connect(plain_head, waits=True, RAY_TRAIN_MINE="1")
    assert "worker_template" in found["parent"] and found["imported"] and found["has_group"]
    assert found["started_at"] < found["asked_at"] and found["inherits"]
    assert (found["watcher"], found["mine"]) == ("0", "1")  # what Ray Train would give each of them

    def is_left(process):
        with contextlib.suppress(OSError):
            return process.pid == found["pid"] or os.getpgid(process.pid) == driver
        return False

    wait_until(lambda: not any(map(is_left, psutil.process_iter())), seconds=60)


@pytest.mark.timeout(400)
def test_a_user_with_a_token_reaches_a_head_without_one(plain_head):
    found, _ = connect(plain_head, waits=False, RAY_AUTH_TOKEN="0" * 64)
    assert "worker_template" in found["parent"] and found["inherits"]


@pytest.mark.timeout(400)
def test_without_private_parts_workers_are_what_ray_starts(plain_head):
    found, _ = connect(plain_head, waits=False, SCALERAY_PRIVATE_PARTS="0")
    assert "worker_template" not in found["parent"] and not found["imported"] and found["inherits"]
