"""Recipes of jobs/recipes with ready workloads of transformers: checked, verified, and as good as a plain loop."""

from __future__ import annotations

import importlib.util
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from small_runs import make_job, same_generators, train_alone
from verified import judge_all

import scaleray
from scaleray.common.seeding import seed_everything, stream_seed
from scaleray.config import load_config
from scaleray.data import TRAIN
from scaleray.workload import load_workload

RECIPES = Path(__file__).parent.parent / "jobs" / "recipes"
FIGURES = {
    "text_classes": ("val/accuracy", 0.02),
    "lora_classes": ("val/accuracy", 0.03),
    "entities": ("val/f1", 0.02),
    "t5_names": ("val/exact_match", 0.05),
}
"""Metric of each recipe, and how far the mean over three seeds may be below a plain loop's."""
SEEDS = (0, 1, 2)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder with the recipes' data, and a Llama with random weights for the adapters."""
    import transformers

    folder = tmp_path_factory.mktemp("recipes")
    spec = importlib.util.spec_from_file_location("write_data", RECIPES / "write_data.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(folder / "build" / "recipes")
    config = yaml.safe_load((RECIPES / "causal_lm.yaml").read_text())["workload"]["args"]["model"]
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "build/recipes/tokenizer")
    kind = transformers.AutoConfig.for_model(**config, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    transformers.AutoModelForCausalLM.from_config(kind).save_pretrained(folder / "build/recipes/llama")
    tokenizer.save_pretrained(folder / "build/recipes/llama")
    return folder


@pytest.fixture(autouse=True)
def _there(request, monkeypatch):
    if "data" in request.fixturenames:
        monkeypatch.chdir(request.getfixturevalue("data"))


def recipe_of(name):
    """The workload of a recipe, and its flags."""
    config = load_config(RECIPES / f"{name}.yaml", environ={})
    stated = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    flags = {
        f"{section}.{key}": value
        for section, values in stated.items()
        if section not in ("workload", "tracking")
        for key, value in values.items()
    }
    return load_workload(config.workload.name, dict(config.workload.args)), {"optimizer.name": "adamw", **flags}


@pytest.mark.parametrize("name", FIGURES)
def test_a_recipe_has_at_most_thirty_lines(name):
    assert len((RECIPES / f"{name}.yaml").read_text().splitlines()) <= 30


@pytest.mark.combination
@pytest.mark.filterwarnings("ignore:initialised at random")
@pytest.mark.parametrize("name", FIGURES)
def test_a_recipe_passes_its_check(data, name):
    record = scaleray.check(RECIPES / f"{name}.yaml", processes=False)
    assert record.passed, record.verdict


def verdicts(place, name, folder):
    import os

    os.chdir(folder)
    workload, flags = recipe_of(name)
    return [
        outcome.verdict for outcome in judge_all(place, workload, {**flags, "strategy.name": "ddp"}, (1, 2), steps=3)
    ]


@pytest.mark.combination
@pytest.mark.filterwarnings("ignore:initialised at random")
@pytest.mark.parametrize("name", ["text_classes", "entities", "t5_names"])
def test_two_workers_train_what_one_process_does(data, gloo, name):
    assert gloo.run(2, verdicts, name, str(data))[0] == ["equal"] * 2


def plain_steps(workload, model, flags, batches):
    """Losses of a loop in plain torch: the loss that the model returns, AdamW, a warm-up and a cosine."""
    train, size, peak = workload.datasets()[TRAIN], flags["batch.global_size"], float(flags["optimizer.learning_rate"])
    in_steps = lambda text: int(text.split()[0]) * (train.num_rows // size if "epoch" in text else 1)
    total, warmup = in_steps(flags["stop.after"]), in_steps(flags["schedule.warmup"])
    optimizer = torch.optim.AdamW(model.parameters(), peak, weight_decay=0.0)
    losses = []
    for step, rows in enumerate(itertools.islice(batches, total)):
        cosine = (1 + math.cos(math.pi * max(step - warmup, 0) / (total - warmup))) / 2
        optimizer.param_groups[0]["lr"] = peak * min((step + 1) / warmup, cosine)
        optimizer.zero_grad()
        batch = workload.collate(train.read(rows))
        loss = model(**workload.inputs(batch), labels=batch["labels"].long()).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), flags.get("optimizer.clip_norm", float("inf")))
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.combination
@pytest.mark.filterwarnings("ignore:initialised at random")
@pytest.mark.parametrize("name", ["t5_names", "lora_classes"])
def test_each_step_is_that_of_a_plain_loop(data, name):
    workload, flags = recipe_of(name)
    flags = {**flags, "schedule.warmup": "4 steps", "stop.after": "12 steps", "evaluation.every": None}
    run, plan = train_alone(workload, flags), make_job(workload, flags)[0].train_plan()
    with same_generators():
        seed_everything(stream_seed(0, "model"))
        model = workload.build_model().double()
    losses = plain_steps(workload, model, flags, map(plan.global_indices, range(12)))
    assert run.losses == pytest.approx(losses, rel=1e-9)


def plain_loop(workload, flags, metric, seed):
    """The recipe's metric after a plain loop over rows shuffled by epoch."""
    torch.manual_seed(seed)
    splits, size, draw = workload.datasets(), flags["batch.global_size"], np.random.default_rng(seed)
    num_rows = splits[TRAIN].num_rows
    shuffled = (draw.permutation(num_rows)[: num_rows // size * size].reshape(-1, size) for _ in itertools.count())
    model = workload.build_model()
    plain_steps(workload, model, flags, itertools.chain.from_iterable(shuffled))
    held_out, sums = splits["val"], {}
    parts = [workload.collate(held_out.read(rows)) for rows in np.array_split(np.arange(held_out.num_rows), 8)]
    with torch.no_grad():
        model.eval()
        found = [workload.metrics(model, part) for part in parts]
        found.append(workload.evaluate(model, parts, split="val", rank=0, world_size=1))
    for pairs in found:
        for name, pair in pairs.items():
            sums[name] = sums.get(name, 0.0) + np.array([float(value) for value in pair])
    value, count = sums[metric.removeprefix("val/")]
    return value / count


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore:initialised at random")
@pytest.mark.parametrize("name", FIGURES)
def test_a_recipe_is_as_good_as_a_plain_loop_over_three_seeds(data, name):
    metric, allowed = FIGURES[name]
    ours, plain = [], []
    for seed in SEEDS:
        workload, flags = recipe_of(name)
        run = train_alone(workload, {**flags, "seed": seed, "precision.dtype": "fp32"})
        ours.append(run.evaluations[-1].metrics[metric])
        with same_generators():
            plain.append(plain_loop(workload, flags, metric, seed))
        print(name, seed, ours[-1], plain[-1], flush=True)
    assert np.mean(ours) >= np.mean(plain) - allowed, (ours, plain)
