"""`jobs/path_digits.sh`: from a baseline to a model that MLflow serves, as it is written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import scaleray
from scaleray.models.registry import ModelRegistry, Named
from scaleray.recording.store import open_client
from scaleray.records.run_record import RunRecord
from scaleray.release.path.path_state import read
from scaleray.release.promote.verify_promoted import check_promoted

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_digits_go_from_a_baseline_to_a_served_champion(tmp_path):
    environment = {**os.environ, "FOLDER": str(tmp_path), "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", str(ROOT / "jobs" / "path_digits.sh")], env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    path = read(tmp_path / "path-digits")
    assert path.next_task() is None
    assert {task.key for task in path.tasks if task.status == "skipped"} == {"optimise/decide"}
    results = {task.key: task.words for task in path.tasks}
    assert results["distribute/doctor"].startswith("ready") and results["distribute/plan"].startswith("recommended: ")
    assert results["distribute/verify"].startswith("passed: ") and "pass" in results["validate/gate"]
    assert not [key for key, words in results.items() if not words and key != "produce/dashboards"]
    assert check_promoted("digits@champion", uri=path.tracking_uri).answer == "pass"
    asked, answered = re.findall(r"\[([\d, ]+)\]", done.stdout.splitlines()[-2])
    assert asked == answered, "the first eight digits are easy"
    folder = tmp_path / "path-digits"
    assert all((folder / name).is_file() for name in ("runbook.md", "pipeline/retrain.sh"))
    assert (folder / "dashboards/alerts.yaml").read_text() == (folder / "pipeline/alerts.yaml").read_text()
    assert not [task.key for task in path.tasks if "{" in task.shell]
    no_longer_promoted_where_its_run_was_deleted(path)


def no_longer_promoted_where_its_run_was_deleted(path):
    """The promotion of a path, done again, is refused by name where somebody has deleted the candidate's run."""
    record = RunRecord.from_json((Path(path.folder) / "runs/candidate-0/record.json").read_text())
    open_client(path.tracking_uri).delete_run(record.run_id)
    scaleray.redo_on_path("produce/promote", "somebody cleaned up", name=path.folder)
    task = scaleray.next_on_path(path.folder).task("produce/promote")
    assert (task.status, task.exit_code) == ("failed", 2) and "is deleted" in task.words
    registry = ModelRegistry(path.tracking_uri)
    assert registry.find(Named.parse("digits@champion")).number == 1, "nothing new was registered"
