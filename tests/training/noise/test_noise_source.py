"""From what gradient noise is measured, and what is refused or left out with its reason."""

import pytest

from scaleray.config import load_config
from scaleray.config.recipe.derive import derive
from scaleray.config.recipe.noise_source import noise_source
from scaleray.config.recipe.values import DataSize
from scaleray.errors import ConfigError

BASE = {
    "workload.name": "x:Y", "batch.global_size": 24, "optimizer.learning_rate": 0.1, "stop.after": "2 epochs",
    "optimizer.name": "sgd", "noise_scale.measure": True,
}  # fmt: skip


def recipe_and_source(flags):
    config = load_config(flags={**BASE, **flags}, environ={})
    recipe = derive(config, DataSize(240))
    data_parallel_size = recipe.degrees.data
    return noise_source(
        config, recipe.strategy, data_parallel_size=data_parallel_size, accumulation_steps=recipe.accumulation_steps
    )


TWO = {"scale.workers": 2}
IN_PARTS = {"batch.micro_size": 4}
FSDP = {**TWO, "strategy.name": "fsdp"}
ADAM = {"optimizer.name": "adamw", "noise_scale.preconditioned": True}


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (TWO, "workers"),
        ({**TWO, **IN_PARTS}, "workers"),
        ({**TWO, "strategy.name": "zero1"}, "workers"),
        ({**TWO, "compression.name": "bf16"}, "workers"),
        (FSDP, "workers"),
        ({**FSDP, **IN_PARTS}, "workers"),
        (IN_PARTS, "first micro-batch"),
        ({**TWO, **IN_PARTS, "strategy.name": "local_sgd"}, "first micro-batch"),
        ({**TWO, **IN_PARTS, "strategy.name": "tensor"}, "first micro-batch"),
        ({**FSDP, **IN_PARTS, **ADAM, "fsdp.accumulate": "sharded"}, "first micro-batch"),
        ({**TWO, **ADAM}, "workers"),
        ({}, "consecutive steps"),
        ({**TWO, "strategy.name": "tensor"}, "consecutive steps"),
        ({**TWO, "strategy.name": "gossip"}, "consecutive steps"),
        ({**FSDP, **ADAM}, "consecutive steps"),
    ],
)
def test_the_source_that_is_exact_is_taken_where_there_is_one(flags, name):
    assert recipe_and_source(flags).name == name
    automatic = recipe_and_source({**flags, "noise_scale.measure": "auto"})
    assert automatic.name == (None if name == "consecutive steps" else name)
    assert automatic.name or automatic.why, "what is not measured says why"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({**TWO, "compression.name": "int8"}, "compression.name int8"),
        ({**TWO, "compression.name": "topk"}, "does not send the mean gradient"),
        ({**TWO, "pruning.method": "magnitude"}, "pruning.method magnitude"),
        ({**TWO, "strategy.name": "pipeline"}, "under pipeline"),
        ({**TWO, **ADAM, "strategy.name": "zero1"}, "second moments"),
        ({**TWO, **ADAM, "strategy.name": "tensor"}, "second moments"),
        ({**TWO, "noise_scale.preconditioned": True}, "sgd does not divide by a second moment"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_reason_and_left_out_by_auto(flags, words):
    with pytest.raises(ConfigError, match=words):
        recipe_and_source(flags)
    assert recipe_and_source({**flags, "noise_scale.measure": "auto"}).name is None


def test_nothing_is_measured_unless_it_is_asked_for():
    assert recipe_and_source({**TWO, "noise_scale.measure": False}).name is None


def test_an_elastic_run_measures_again_when_it_has_workers_again():
    flags = {"scale.workers": "1..2", "compression.name": "none"}
    assert recipe_and_source(flags).name == "workers"
    config = load_config(flags={**BASE, **flags, "noise_scale.preconditioned": False}, environ={})
    derive(config, DataSize(240), workers=1)
