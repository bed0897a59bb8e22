"""The reference jobs for ragged rows and an IterableDataset: a few steps alike on one worker and two, and their figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import job_of, relative_differences, same_generators, train_job

from scaleray.config import load_config
from scaleray.training.setup.rank_context import RankContext
from scaleray.workload import load_workload

RECIPES = Path(__file__).parent.parent.parent / "jobs" / "recipes"
FIGURES = {"strokes": 0.88, "source_lines": 0.84}


def run(place, name, **flags):
    given = {"scale.workers": place.world_size, "tracking.every_steps": 1, **flags}
    config = load_config(RECIPES / f"{name}.yaml", flags=given, environ={})
    job, sources = job_of(
        config, load_workload(config.workload.name, config.workload.args, base_dir=RECIPES.parent.parent)
    )
    return train_job(place, job, sources)


def alone(name, **flags):
    with same_generators():
        return run(RankContext(), name, **flags)


def run_with(place, name, flags):
    return run(place, name, **flags)


@pytest.mark.combination
@pytest.mark.parametrize("name", FIGURES)
def test_a_few_steps_are_those_of_one_process_on_two_workers(gloo, name):
    flags = {"stop.after": "4 steps", "precision.dtype": "fp64", "schedule.warmup": "0 steps", "workload.args.width": 8}
    whole = alone(name, **flags)
    assert len(whole.losses) == 4 and 0 < whole.evaluations[-1].metrics["val/accuracy"] < 1
    spread = gloo.run(2, run_with, name, flags)[0]
    assert max(relative_differences(spread.losses, whole.losses)) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", FIGURES)
def test_a_recipe_learns_what_its_file_says(gloo, name, world_size):
    finished = alone(name) if world_size == 1 else gloo.run(world_size, run_with, name, {})[0]
    assert finished.evaluations[-1].metrics["val/accuracy"] >= FIGURES[name]


@pytest.mark.parametrize("name", FIGURES)
def test_a_recipe_has_at_most_40_lines_of_workload(name):
    text = (RECIPES / f"{name}.py").read_text()
    assert len(text[text.index("(Workload):") :].strip().splitlines()) <= 40
