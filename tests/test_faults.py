"""Faults on purpose: the suite of jobs/faults.py, and a short version of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def suite(tmp_path, *options, seconds):
    """The command in a process of its own: its cluster and the session's head cannot share a driver."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    command = [sys.executable, "jobs/faults.py", "--json", str(tmp_path / "report.json"), *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    return report["faults"], done.stdout


@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_forty_faults_leave_no_trace(tmp_path):
    faults, output = suite(tmp_path, "--faults", "40", "--seed", "0", seconds=2600)
    injected = [fault for fault in faults if fault["is_injected"]]
    assert len(injected) >= 40
    assert all(fault["weights_equal"] and fault["records_equal"] and fault["samples_once"] for fault in injected)
    assert "every run ended as if undisturbed" in output


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_workers_with_their_controller_three_times_and_the_recorder_leave_one_run_without_a_gap(tmp_path):
    kinds = ["workers and controller killed", "recorder killed"]
    faults, _ = suite(tmp_path, "--faults", "6", "--kinds", ",".join(kinds), seconds=1400)
    injected = [fault for fault in faults if fault["is_injected"]]
    assert sorted(fault["kind"] for fault in injected) == sorted(3 * kinds)
    assert {fault["run"] for fault in injected} == {1}, "all in one run"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_worker_a_flipped_bit_and_a_hang_leave_no_trace(tmp_path):
    kinds = ["worker killed", "shard bit flipped", "hang in user code"]
    faults, _ = suite(tmp_path, "--quick", "--faults", "3", "--kinds", ",".join(kinds), seconds=880)
    assert sorted(fault["kind"] for fault in faults if fault["is_injected"]) == sorted(kinds)
