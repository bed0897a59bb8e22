"""`jobs/path_digits.sh`: from a baseline to a model that MLflow serves, as it is written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scaleray.launch.path.state import read
from scaleray.launch.promote.check import check_promoted

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
    assert [trial.name for trial in path.trials] == ["larger"] and path.trials[0].verdict
    assert check_promoted("digits@champion", uri=path.tracking_uri).answer == "pass"
    asked, answered = re.findall(r"\[([\d, ]+)\]", done.stdout.splitlines()[-2])
    assert asked == answered, "the first eight digits are easy"
    assert all((tmp_path / "path-digits" / name).is_file() for name in ("path.html", "runbook.md"))
