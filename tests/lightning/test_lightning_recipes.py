"""The Lightning recipes of jobs/recipes: two workers train what one does, and both reach what Lightning's Trainer does."""

import functools
import sys
import warnings
from pathlib import Path

import lightning as L
import numpy as np
import pytest
from small_runs import largest_difference, train, train_alone

from scaleray.config import load_config
from scaleray.config.brought import with_brought
from scaleray.workload import load_workload

RECIPES = Path(__file__).parents[2] / "jobs" / "recipes"
sys.path.append(str(RECIPES))  # the recipes import their neighbours
FIGURES = {
    "lightning_gan": ("gan", "class LitGan", "val/as_asked", 0.02),
    "lightning_callbacks": ("classifier", "class CountsRows", "val/acc", 0.01),
    "lightning_unet": ("unet", "class LitUNet", "val/iou", 0.01),
}
"""Workload of each recipe, its first line, its metric, and how far the mean over three seeds may be below the Trainer's."""
SHORT = {"stop.after": "3 steps", "stop.patience": None, "stop.watch": None, "evaluation.every": None}
SEEDS = (0, 1, 2)


def recipe_of(name, **changes):
    workload = load_workload(f"{RECIPES / name}.py:{FIGURES[name][0]}", {})
    config = with_brought(load_config(RECIPES / f"{name}.yaml", environ={}), workload)
    flags = {
        "batch.global_size": config.batch.global_size, "optimizer.name": "adamw", "optimizer.learning_rate": None,
        "stop.after": str(config.stop.after), "evaluation.every": str(config.evaluation.every),
        "stop.patience": config.stop.patience, "stop.watch": config.stop.watch, "evaluation.micro_size": 512, **changes,
    }  # fmt: skip
    return workload, flags


def trained(place, name, changes):
    workload, flags = recipe_of(name, **changes)
    return train(place, workload, {**flags, "strategy.name": "ddp"})


@pytest.mark.parametrize("name", FIGURES)
def test_a_recipe_has_at_most_thirty_lines(name):
    text = (RECIPES / f"{name}.py").read_text()
    assert len([line for line in text[text.index(FIGURES[name][1]) :].splitlines() if line.strip()]) <= 30


@pytest.mark.combination
@pytest.mark.parametrize("name", ["lightning_gan", "lightning_unet"])  # the other one has dropout
def test_two_workers_train_what_one_does(gloo, name):
    workload, flags = recipe_of(name, **SHORT)
    alone, both = train_alone(workload, flags), gloo.run(2, trained, name, SHORT)[0]
    assert largest_difference(alone.weights, both.weights) < 1e-9
    assert both.evaluations[-1].metrics == pytest.approx(alone.evaluations[-1].metrics, rel=1e-6, abs=0.01)


def with_the_trainer(name, seed):
    """The best value of the recipe's metric under Lightning's own Trainer."""
    workload, flags = recipe_of(name)
    module, data = workload.parts.module, workload.parts.data
    L.seed_everything(seed)
    made, epochs = module(), int(flags["stop.after"].split()[0])
    every = 1 if flags["evaluation.every"] == "None" else int(flags["evaluation.every"].split()[0])
    values = []
    shown = FIGURES[name][2].replace("/", "_")
    noting = L.pytorch.callbacks.LambdaCallback(
        on_validation_end=lambda trainer, _: values.append(float(trainer.callback_metrics[shown]))
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callbacks = [c for c in made.configure_callbacks() if "Early" in type(c).__name__]
        made.configure_callbacks = list
        trainer = L.Trainer(
            max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
            check_val_every_n_epoch=every, callbacks=[noting, *callbacks],
        )  # fmt: skip
        if isinstance(data, type):
            trainer.fit(made, data())
        else:
            loaders = data()
            trainer.fit(made, loaders["train"], loaders["val"])
    return values[-1]


@functools.cache
def trainers_values(name):
    return [with_the_trainer(name, seed) for seed in SEEDS]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", FIGURES)
def test_three_seeds_reach_what_lightnings_trainer_does(gloo, name, world_size):
    ours = []
    for seed in SEEDS:
        changes = {"precision.dtype": "fp32", "seed": seed}
        if world_size == 1:
            finished = train_alone(*recipe_of(name, **changes))
        else:
            finished = gloo.run(world_size, trained, name, changes)[0]
        ours.append(finished.evaluations[-1].metrics[FIGURES[name][2]])
    theirs = trainers_values(name)
    print(name, world_size, ours, theirs, flush=True)
    assert np.mean(ours) >= np.mean(theirs) - FIGURES[name][3]
