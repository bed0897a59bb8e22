"""Recipes of jobs/recipes with ready workloads of transformers: checked and verified."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import yaml
from verified import judge_all

import scaleray
from scaleray.config import load_config
from scaleray.workload import load_workload

RECIPES = Path(__file__).parent.parent / "jobs" / "recipes"
NAMES = ("text_classes", "lora_classes", "entities", "t5_names")


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


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_has_at_most_thirty_lines(name):
    assert len((RECIPES / f"{name}.yaml").read_text().splitlines()) <= 30


@pytest.mark.combination
@pytest.mark.filterwarnings("ignore:initialised at random")
@pytest.mark.parametrize("name", NAMES)
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
@pytest.mark.parametrize("name", ["entities", "t5_names"])
def test_two_workers_train_what_one_process_does(data, gloo, name):
    assert gloo.run(2, verdicts, name, str(data))[0] == ["equal"] * 2
