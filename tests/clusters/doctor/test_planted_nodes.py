"""A node that is really wrong: another torch, a clock that is ahead, and runs' storage that it cannot write."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from machines import machines

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
AHEAD = "import time\nright = time.time\ntime.time = lambda: right() + 30\n"
"""Every Python of a machine begins with it: its clock is ahead, for all that ask by `time.time`."""
BOOT = "/proc/sys/kernel/random/boot_id"
"""By which machines with one clock are known: it is this machine's, in all that are made of it."""


def test_a_node_with_another_torch_a_wrong_clock_and_no_right_to_write_is_named_for_each(tmp_path):
    (tmp_path / "other" / "torch-2.12.1.dist-info").mkdir(parents=True)
    (tmp_path / "other" / "torch-2.12.1.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.12.1\n")
    (tmp_path / "other" / "sitecustomize.py").write_text(AHEAD)
    (tmp_path / "runs").mkdir()
    (tmp_path / "boot").write_text("another one\n")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SCALERAY_", "MLFLOW_"))}
    kept |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "PYTHONPATH": str(ROOT)}
    kept |= {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with machines(2, tmp_path) as [head, wrong]:

        def run(machine, *words, **variables):
            return subprocess.run(
                machine.command(words), cwd=ROOT, env={**kept, **variables}, capture_output=True, text=True, timeout=250
            )

        def start(machine, *words, **variables):
            sizes = ["--num-cpus=1", "--object-store-memory=200000000", "--disable-usage-stats", "--temp-dir=/tmp/ray"]
            ray = str(Path(sys.executable).with_name("ray"))
            done = run(machine, ray, "start", *words, *sizes, f"--node-ip-address={machine.address}", **variables)
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

        for words in (["-o", "ro", str(tmp_path / "runs"), str(tmp_path / "runs")], [str(tmp_path / "boot"), BOOT]):
            assert run(wrong, "mount", "--bind", *words).returncode == 0
        address = f"{head.address}:6379"
        start(head, "--head", "--port=6379", "--include-dashboard=false")
        start(wrong, f"--address={address}", PYTHONPATH=f"{tmp_path / 'other'}:{ROOT}")
        words = ["doctor", "--address", address, "--storage", str(tmp_path / "runs"), "--json"]
        done = run(head, sys.executable, "-m", "scaleray", *words)

    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    print(json.dumps(checks, indent=1))
    red = {name for name, check in checks.items() if check["verdict"] == "red"}
    assert red == {"versions", "clocks", "shared storage"}
    assert all(wrong.address in checks[name]["found"] for name in red)
    assert "2.12.1" in checks["versions"]["found"] and "ahead" in checks["clocks"]["found"]
    assert "Read-only file system" in checks["shared storage"]["found"]
