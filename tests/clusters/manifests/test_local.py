"""`cluster/local`: a training on two nodes of this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_files import CLUSTER, ROOT
from listening import MARK, processes


@pytest.mark.slow
def test_the_script_trains_on_two_nodes_of_this_machine_and_leaves_nothing(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "scaleray").write_text(f'#!/bin/sh\nexec {sys.executable} -m scaleray "$@"\n')
    (tmp_path / "bin" / "scaleray").chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SCALERAY_"))}
    mark = f"script-{os.getpid()}"
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "PATH": path, MARK: mark}
    options = ["--stop.after", "2 epochs", "--scale.cpus-per-worker", "1", "--data.reserved-cpus", "1"]
    options += [
        "--checkpoint.storage-path",
        str(tmp_path / "runs"),
        "--tracking.uri",
        f"sqlite:///{tmp_path}/mlflow.db",
    ]
    done = subprocess.run(
        [str(CLUSTER / "local" / "train.sh"), *options],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [record] = Path(tmp_path / "runs").glob("*/record.json")
    values = json.loads(record.read_text())
    assert values["status"] == "FINISHED" and values["workers"] == 2
    assert not processes(mark) and " is down" in done.stdout
