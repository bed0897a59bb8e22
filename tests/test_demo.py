"""`make demo`, as a new user runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_prints_its_table_and_leaves_no_ray_behind():
    import psutil

    before = {p.pid for p in psutil.process_iter()}
    done = subprocess.run([sys.executable, "jobs/demo.py"], cwd=ROOT, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr
    difference = re.search(r"largest difference of the loss over 460 steps is (\S+)", done.stdout)
    assert difference is not None
    assert float(difference.group(1)) < 0.02
    assert done.stdout.count("digits") >= 2
    assert "workflowType=machine_learning" in done.stdout
    report = re.search(r"report: +(\S+)", done.stdout)
    assert report is not None and "<svg" in Path(report.group(1)).read_text()
    picture = re.search(r"picture: (\S+)", done.stdout)
    assert picture is not None and Path(picture.group(1)).stat().st_size > 0
    assert "study: strong scaling: " in done.stdout and done.stdout.count("language model") >= 3
    left = [p.name() for p in psutil.process_iter() if p.pid not in before and p.name() in ("raylet", "gcs_server")]
    assert left == []
