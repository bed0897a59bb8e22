"""Recipes of jobs/recipes with losses of their own: two workers train what one does, and reach what is stated."""

from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import largest_difference, make_job, same_generators, train, train_alone

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


COMPARED = {
    "two_towers": ("TwoTowers", "12 epochs", "val/loss", 0.03),
    "unet_dice": ("Ink", "6 epochs", "val/loss", 0.03),
    "graph": ("Graph", "40 epochs", "test/accuracy", 0.01),
}
"""Class of each recipe, length at which its quality is compared, that quality, and by how much it may differ."""


def compared(name, seed):
    cls, after, *_ = COMPARED[name]
    config = load_config(RECIPES / f"{name}.yaml", environ={})
    flags = {
        "batch.global_size": config.batch.global_size, "optimizer.name": "adamw", "stop.after": after,
        "optimizer.learning_rate": config.optimizer.learning_rate, "evaluation.every": None, "seed": seed,
        "precision.dtype": "fp32",
    }  # fmt: skip
    return load_workload(f"{RECIPES / name}.py:{cls}", {}), flags


def in_two_parts(place, name, seed):
    workload, flags = compared(name, seed)
    return train(
        place, workload, {**flags, "strategy.name": "ddp", "batch.micro_size": flags["batch.global_size"] // 4}
    )


def in_a_plain_loop(name, seed):
    """The quality after the same training in nothing but torch."""
    workload, flags = compared(name, seed)
    job, data, size = make_job(workload, flags)[0], workload.datasets(), flags["batch.global_size"]
    noise = torch.Generator().manual_seed(seed)  # a plain loop draws it in its own way
    split, _, metric = COMPARED[name][2].partition("/")

    def rows_of(split, index):
        rows = {column: torch.as_tensor(values[index]) for column, values in data[split].items()}
        if name == "unet_dice":
            rows["image"] = rows["image"] + torch.randn(rows["image"].shape, generator=noise)
        return rows

    with same_generators():
        torch.manual_seed(seed)
        model = workload.build_model()
        optimizer = torch.optim.AdamW(model.parameters(), flags["optimizer.learning_rate"], weight_decay=0.0)
        for step in range(job.recipe.total_steps):
            optimizer.zero_grad()
            total, count = workload.loss(model, rows_of("train", job.train_plan().global_indices(step)))
            (total / count).backward()
            optimizer.step()
        found = [0.0, 0.0]
        with torch.no_grad():
            for start in range(0, len(next(iter(data[split].values()))), size):
                rows = rows_of(split, slice(start, start + size))
                total, count = workload.loss(model, rows) if metric == "loss" else workload.metrics(model, rows)[metric]
                found = [found[0] + float(total), found[1] + float(count)]
    return found[0] / found[1]


@pytest.mark.combination
@pytest.mark.parametrize("name", COMPARED)
def test_two_workers_with_accumulation_reach_what_a_plain_loop_does_over_three_seeds(gloo, name):
    """From other initial weights, and with other noise."""
    metric, allowed = COMPARED[name][2:]
    plain = [in_a_plain_loop(name, seed) for seed in range(3)]
    ours = [gloo.run(2, in_two_parts, name, seed)[0].evaluations[-1].metrics[metric] for seed in range(3)]
    print(name, ours, plain, flush=True)
    assert np.mean(ours) == pytest.approx(np.mean(plain), rel=allowed), (ours, plain)
