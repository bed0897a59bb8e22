"""The GAN of jobs/recipes: two workers train what one does, and both reach what is stated."""

from pathlib import Path

import pytest
from small_runs import largest_difference, train, train_alone

from scaleray.config import load_config
from scaleray.workload import load_workload

RECIPES = Path(__file__).parent.parent / "jobs" / "recipes"
FIGURES = {"gan": ("Gan", 0.85)}
"""Class of each recipe, and the share of digits that must be drawn as asked."""


def recipe_of(name, **changes):
    config = load_config(RECIPES / f"{name}.yaml", environ={})
    flags = {
        "batch.global_size": config.batch.global_size, "optimizer.name": "adamw",
        "optimizer.learning_rate": config.optimizer.learning_rate, "stop.after": str(config.stop.after),
        "evaluation.every": str(config.evaluation.every), **changes,
    }  # fmt: skip
    return load_workload(f"{RECIPES / name}.py:{FIGURES[name][0]}", {}), flags


def trained(place, name, changes):
    workload, flags = recipe_of(name, **changes)
    return train(place, workload, {**flags, "strategy.name": "ddp"})


SHORT = {"stop.after": "3 steps", "evaluation.every": None}


@pytest.mark.combination
@pytest.mark.parametrize("name", FIGURES)
def test_two_workers_train_what_one_does(gloo, name):
    workload, flags = recipe_of(name, **SHORT)
    alone, both = train_alone(workload, flags), gloo.run(2, trained, name, SHORT)[0]
    assert largest_difference(alone.weights, both.weights) < 1e-9
    assert both.evaluations[-1].metrics == pytest.approx(alone.evaluations[-1].metrics, rel=1e-6, abs=0.01)


@pytest.mark.parametrize("name", FIGURES)
def test_a_workload_has_at_most_forty_lines(name):
    text = (RECIPES / f"{name}.py").read_text()
    lines = [line for line in text[text.index(f"class {FIGURES[name][0]}") :].splitlines() if line.strip()]
    assert len(lines) <= 40


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", FIGURES)
def test_it_draws_the_digits_that_it_is_asked_for(gloo, name, world_size):
    changes = {"precision.dtype": "fp32"}
    if world_size == 1:
        finished = train_alone(recipe_of(name)[0], {**recipe_of(name)[1], **changes})
    else:
        finished = gloo.run(world_size, trained, name, changes)[0]
    assert finished.evaluations[-1].metrics["val/as_asked"] >= FIGURES[name][1]
