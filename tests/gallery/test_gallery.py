"""Recipes as people write them: each trains on one and on two workers to the same losses, or is refused by one sentence.

To add one, put a file into `recipes/`: a class `Workload` (see `recipe.py`), and where needed FLAGS (config keys) and
REFUSED (a regular expression for the refusal; REFUSED_ON_TWO for one on two workers only). It runs in a folder of its own, into which `prepare()` may write.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from small_runs import train, train_alone

from scaleray.errors import ScaleRayError
from scaleray.workload import load_workload

RECIPES = Path(__file__).parent / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.py"))
FLAGS = {"stop.after": "6 steps", "evaluation.every": "3 steps"}


def recipe_of(name):
    """The workload of a recipe and its flags."""
    workload = load_workload(f"{RECIPES / name}.py:Workload", {})
    return workload, {**FLAGS, **getattr(module_of(name), "FLAGS", {})}


def module_of(name):
    spec = importlib.util.spec_from_file_location(f"gallery_{name}", RECIPES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def losses(run):
    return run.losses + [value for e in run.evaluations for _, value in sorted(e.metrics.items())]


def on_a_worker(place, name, folder):
    before = os.getcwd()
    os.chdir(folder)
    try:
        return losses(train(place, *recipe_of(name)))
    finally:
        os.chdir(before)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_trains_alike_on_one_and_two_workers_or_is_refused(name, gloo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = module_of(name)
    module.Workload.prepare()
    if (words := getattr(module, "REFUSED", None)) is not None:
        with pytest.raises(ScaleRayError, match=f"(?s){words}") as refusal:
            train_alone(*recipe_of(name))
        assert "Traceback" not in str(refusal.value)
        return
    if (words := getattr(module, "REFUSED_ON_TWO", None)) is not None:
        assert losses(train_alone(*recipe_of(name)))
        with pytest.raises(ScaleRayError, match=f"(?s){words}"):
            gloo.run(2, on_a_worker, name, str(tmp_path))
        return
    alone = losses(train_alone(*recipe_of(name)))
    assert len(alone) >= 6
    together, _ = gloo.run(2, on_a_worker, name, str(tmp_path))  # rank 0 has the records
    assert together == pytest.approx(alone, rel=1e-9)
