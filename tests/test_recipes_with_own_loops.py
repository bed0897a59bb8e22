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


WHOLE_BATCH = {"two_towers": ("TwoTowers", "12 epochs"), "unet_dice": ("Ink", "6 epochs")}
"""Class of each recipe with a loss over the whole batch, and the length at which its quality is compared."""


def of_whole_batch(name, seed):
    config = load_config(RECIPES / f"{name}.yaml", environ={})
    flags = {
        "batch.global_size": 120, "optimizer.name": "adamw", "optimizer.learning_rate": config.optimizer.learning_rate,
        "stop.after": WHOLE_BATCH[name][1], "evaluation.every": None, "seed": seed, "precision.dtype": "fp32",
    }  # fmt: skip
    return load_workload(f"{RECIPES / name}.py:{WHOLE_BATCH[name][0]}", {}), flags


def in_two_parts(place, name, seed):
    workload, flags = of_whole_batch(name, seed)
    return train(place, workload, {**flags, "strategy.name": "ddp", "batch.micro_size": 30})


def in_a_plain_loop(name, seed):
    """The loss of split val after the same training in nothing but torch."""
    workload, flags = of_whole_batch(name, seed)
    plan, data = make_job(workload, flags)[0].train_plan(), workload.datasets()
    noise = torch.Generator().manual_seed(seed)  # a plain loop draws it in its own way

    def rows_of(split, index):
        rows = {column: torch.from_numpy(values[index]) for column, values in data[split].items()}
        if name == "unet_dice":
            rows["image"] = rows["image"] + torch.randn(rows["image"].shape, generator=noise)
        return rows

    with same_generators():
        torch.manual_seed(seed)
        model = workload.build_model()
        optimizer = torch.optim.AdamW(model.parameters(), flags["optimizer.learning_rate"], weight_decay=0.0)
        for step in range(int(WHOLE_BATCH[name][1].split()[0]) * 12):
            optimizer.zero_grad()
            total, count = workload.batch_loss(workload.outputs(model, rows_of("train", plan.global_indices(step))))
            (total / count).backward()
            optimizer.step()
        found = [0.0, 0.0]
        with torch.no_grad():
            for start in range(0, 357, 120):
                total, count = workload.batch_loss(workload.outputs(model, rows_of("val", slice(start, start + 120))))
                found = [found[0] + float(total), found[1] + float(count)]
    return found[0] / found[1]


@pytest.mark.combination
@pytest.mark.parametrize("name", WHOLE_BATCH)
def test_two_workers_with_accumulation_reach_what_a_plain_loop_does_over_three_seeds(gloo, name):
    """Other initial weights and noise; the seeds' spread is 0.03 and 0.002."""
    plain = [in_a_plain_loop(name, seed) for seed in range(3)]
    ours = [gloo.run(2, in_two_parts, name, seed)[0].evaluations[-1].metrics["val/loss"] for seed in range(3)]
    assert np.mean(ours) == pytest.approx(np.mean(plain), rel=0.03), (ours, plain)
