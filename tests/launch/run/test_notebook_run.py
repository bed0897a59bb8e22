"""A training from a notebook: its cells are run by IPython, as its kernel runs them, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CELLS = [
    """
import numpy as np, torch
from torch import nn
import scaleray

class Points(scaleray.Workload):
    def build_model(self):
        return nn.Linear(4, 1)

    def datasets(self):
        x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
        return {"train": {"x": x, "y": x.sum(axis=1, keepdims=True)}}

    def loss(self, model, batch):
        return (model(batch["x"]) - batch["y"]).pow(2).sum(), len(batch["x"])
""",
    """
record = scaleray.train({"batch.global_size": 8, "optimizer.learning_rate": 0.05, "stop.after": "2 epochs", "scale.workers": 2,
                         "checkpoint.storage_path": FOLDER, "tracking.uri": f"sqlite:///{FOLDER}/mlflow.db"}, Points)
""",
    "print('trained', record.workers, record.steps)\nmodel = scaleray.load(record.run_dir, workload=Points)",
    "print('answers', scaleray.predict(record.run_dir, {'x': np.ones((3, 4), 'float32')}, workload=Points).num_rows)",
]
SCRIPT = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_cell(f"FOLDER = {sys.argv[1]!r}")
for cell in %r:
    shell.run_cell(cell).raise_error()
"""


@pytest.mark.combination
@pytest.mark.ray
def test_a_class_of_a_cell_trains_on_two_workers(ray_head, tmp_path):
    pytest.importorskip("IPython")
    environment = {
        **os.environ,
        "RAY_ADDRESS": ray_head.address,
        "IPYTHONDIR": str(tmp_path),
        "HOME": os.environ["HOME"],
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT % (CELLS,), str(tmp_path)],
        capture_output=True, text=True, timeout=300, env=environment, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trained 2 16" in done.stdout and "answers 3" in done.stdout
