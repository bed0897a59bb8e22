"""`make demo`, as a new user runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jobs import demo
from scaleray.studies.curves.steady_state import steady_state

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
    assert "1. Proved in float64: the same training: " in done.stdout
    assert re.search(r"study: (Use|Stay|How many|Whether)", done.stdout) and done.stdout.count("language model") >= 3
    left = [p.name() for p in psutil.process_iter() if p.pid not in before and p.name() in ("raylet", "gcs_server")]
    assert left == []


@pytest.mark.parametrize(
    ("both_s", "words"), [(0.5, "2. Scaling pays"), (1.2, "2. Here two workers were 0.83 times as fast")]
)
def test_the_demo_does_not_claim_a_gain_that_its_table_lacks(monkeypatch, both_s, words):
    points = [
        SimpleNamespace(
            point=SimpleNamespace(step_time_s=SimpleNamespace(value=value)), speedup=SimpleNamespace(value=1 / value)
        )
        for value in (1.0, both_s)
    ]
    study = SimpleNamespace(curves=[SimpleNamespace(points=points)])
    monkeypatch.setattr(demo, "equality", lambda one, two: "")
    monkeypatch.setattr(demo, "study_headline", lambda study: "")
    proof = SimpleNamespace(verdict="the same training")
    assert demo.lessons([SimpleNamespace(step_time_s=0.01)] * 2, proof, study)[2].startswith(words)


def test_the_demo_measures_enough_steps_to_be_steady():
    steps = int(demo.STUDY[demo.STUDY.index("--steps") + 1])
    assert steady_state([0.5] * steps).is_steady
