"""Pipelines: every schedule is the training of one process, wherever the cuts lie and whatever the model shares across them."""

import pytest
import torch
from small_runs import Classify, Tokens, largest_difference, relative_differences, train, train_in_plain_torch
from torch import nn

SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]


class Deep(Classify):
    """Five children, so that four stages have something to do."""

    def build_model(self):
        return nn.Sequential(
            nn.Linear(6, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 8)), nn.Sequential(nn.GELU(), nn.Linear(8, 8)),
            nn.Sequential(nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 3),
        )  # fmt: skip


def assert_same_training(finished, plain, *, within=1e-9):
    assert len(finished.losses) == len(plain.losses)
    assert max(relative_differences(plain.losses, finished.losses)) <= within
    assert max(relative_differences(plain.grad_norms, finished.grad_norms)) <= within
    assert list(finished.weights) == list(plain.weights)
    assert largest_difference(plain.weights, finished.weights) <= within


RECIPES = {
    "one pass": {},
    "micro-batches": {"batch.micro_size": 1, "optimizer.clip_norm": 0.3},
    "adamw": {"batch.micro_size": 2, "optimizer.name": "adamw", "optimizer.learning_rate": 0.01, "optimizer.clip_norm": 0.5},
}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_every_schedule_equals_one_process(gloo, recipe, schedule, world_size):
    flags = {**recipe, "strategy.name": "pipeline", "pipeline.schedule": schedule}
    finished = gloo.run(world_size, train, Deep(), flags)[0]
    assert_same_training(finished, train_in_plain_torch(Deep(), recipe))
