"""Images that are decoded by Ray tasks: the same rows as in one process, and a broken file named."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import small_images
from small_images import write_images

import scaleray
from scaleray.errors import ScaleRayError

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900), pytest.mark.usefixtures("mlflow_database")]


def losses(tmp_path, folder, name, **more):
    config = {
        "workload.name": f"{Path(small_images.__file__)}:Small",
        "workload.args": {"data": {"train": str(folder)}, "size": 8},
        "batch.global_size": 8,
        "optimizer.learning_rate": 0.05,
        "stop.after": "12 steps",
        "tracking": {"uri": f"sqlite:///{tmp_path / 'mlflow.db'}", "every_steps": 1, "system_metrics": False},
        "checkpoint.storage_path": str(tmp_path / name),
    }
    record = scaleray.train({**config, **more.pop("flags", {})}, **more)
    with open(Path(record.run_dir) / "steps.csv", newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.mark.combination
def test_ray_tasks_cut_the_same_pieces_and_a_broken_image_ends_the_run_with_its_path(ray_session, tmp_path):
    folder = write_images(tmp_path / "train", 32)
    here = losses(tmp_path, folder, "here", local=True)
    there = losses(tmp_path, folder, "there", flags={"scale.workers": 2})
    assert there == pytest.approx(here, rel=1e-5)  # float32
    (folder / "dog" / "19.png").write_bytes(b"no image")  # not among the few that are looked at when the run starts
    with pytest.raises(ScaleRayError, match=r"dog/19\.png.* cannot be read"):
        losses(tmp_path, folder, "broken")
