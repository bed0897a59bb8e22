"""Degrees that compose: tensor within the stages of a pipeline, with data over both, repeats one process."""

from __future__ import annotations

import pytest
from small_runs import largest_difference, relative_differences, train, train_in_plain_torch
from small_transformer import SmallTransformer

RECIPE = {
    "optimizer.name": "adamw",
    "optimizer.learning_rate": 0.01,
    "optimizer.clip_norm": 0.5,
    "batch.micro_size": 1,
    "stop.after": "1 epoch",
}
LAYOUTS = {
    "pipeline x tensor": (4, {"parallel.pipeline": 2, "parallel.tensor": 2}),
    "replicate x shard x tensor": (4, {"parallel.replicate": 2, "parallel.shard": 1, "parallel.tensor": 2}),
    "pipeline x tensor, zero bubble": (
        4,
        {"parallel.pipeline": 2, "parallel.tensor": 2, "pipeline.schedule": "zero_bubble"},
    ),
    "context": (2, {"parallel.context": 2}),
    "context, in a ring": (4, {"parallel.context": 4, "context.exchange": "ring"}),
    "replicate x context, in a ring": (4, {"parallel.context": 2, "context.exchange": "ring"}),
    "shard x context": (4, {"parallel.shard": 2, "parallel.context": 2}),
    "context x tensor": (4, {"parallel.context": 2, "parallel.tensor": 2, "context.exchange": "ring"}),
    "pipeline x context": (4, {"parallel.pipeline": 2, "parallel.context": 2, "context.exchange": "ring"}),
    "pipeline x replicate x shard": (4, {"parallel.pipeline": 2, "parallel.shard": 2}),
}


def mostly_in_turn(names, always):
    """The names as parameters, of which all but a few take turns."""
    return [name if name in always else pytest.param(name, marks=pytest.mark.combination) for name in names]


@pytest.mark.parametrize("tie_head", [True, pytest.param(False, marks=pytest.mark.combination)])
@pytest.mark.parametrize("layout", mostly_in_turn(LAYOUTS, ("pipeline x tensor", "context, in a ring")))
def test_a_composed_layout_equals_one_process(gloo, layout, tie_head):
    world_size, degrees = LAYOUTS[layout]
    workload = SmallTransformer(num_val=6, tie_head=tie_head)
    finished = gloo.run(world_size, train, workload, {**RECIPE, **degrees})[0]
    plain = train_in_plain_torch(workload, RECIPE)
    assert len(finished.losses) == len(plain.losses)
    assert max(relative_differences(plain.losses, finished.losses)) <= 1e-9
    assert max(relative_differences(plain.grad_norms, finished.grad_norms)) <= 1e-9
    assert list(finished.weights) == list(plain.weights)
    assert largest_difference(plain.weights, finished.weights) <= 1e-9
    alone = gloo.run(1, train, workload, RECIPE)[0]
    assert finished.evaluations[-1].metrics == pytest.approx(alone.evaluations[-1].metrics, rel=1e-12)


EXPERTS = {"num_experts": 4, "experts_per_token": 2}
LAYOUTS_OF_EXPERTS = {
    "all experts on each worker": (2, {}),
    "sharded": (2, {"parallel.shard": 2}),
    "expert": (2, {"parallel.shard": 2, "parallel.expert": 2}),
    "expert over all": (4, {"parallel.shard": 4, "parallel.expert": 4}),
    "expert within shard": (4, {"parallel.shard": 4, "parallel.expert": 2}),
    "expert within replicate x shard": (4, {"parallel.shard": 2, "parallel.expert": 2}),
    "expert over context": (2, {"parallel.context": 2, "parallel.expert": 2}),
    "expert within replicate x context": (4, {"parallel.replicate": 2, "parallel.context": 2, "parallel.expert": 2}),
    "expert over shard x context": (4, {"parallel.shard": 2, "parallel.context": 2, "parallel.expert": 4}),
    "context": (2, {"parallel.context": 2, "context.exchange": "ring"}),
    "tensor": (2, {"parallel.tensor": 2}),
    "tensor, whole sequences": (2, {"parallel.tensor": 2, "tensor.sequence_parallel": False}),
    "expert within shard, with tensor": (4, {"parallel.shard": 2, "parallel.tensor": 2, "parallel.expert": 2}),
    "pipeline": (2, {"parallel.pipeline": 2}),
    "pipeline with tensor": (4, {"parallel.pipeline": 2, "parallel.tensor": 2}),
    "pipeline with shard": (4, {"parallel.pipeline": 2, "parallel.shard": 2, "pipeline.schedule": "zero_bubble"}),
    "pipeline with context": (4, {"parallel.pipeline": 2, "parallel.context": 2, "pipeline.schedule": "gpipe"}),
}


@pytest.mark.parametrize("capacity", [None, pytest.param(0.6, marks=pytest.mark.combination)])
@pytest.mark.parametrize("layout", mostly_in_turn(LAYOUTS_OF_EXPERTS, ("expert",)))
def test_experts_in_a_layout_equal_one_process(gloo, layout, capacity):
    world_size, degrees = LAYOUTS_OF_EXPERTS[layout]
    workload = SmallTransformer(num_val=6, expert_capacity=capacity, **EXPERTS)
    finished = gloo.run(world_size, train, workload, {**RECIPE, **degrees})[0]
    plain = train_in_plain_torch(workload, RECIPE)
    assert max(relative_differences(plain.losses, finished.losses)) <= 1e-9
    assert max(relative_differences(plain.grad_norms, finished.grad_norms)) <= 1e-9
    assert largest_difference(plain.weights, finished.weights) <= 1e-9
    alone = gloo.run(1, train, workload, RECIPE)[0]
    assert finished.evaluations[-1].metrics == pytest.approx(alone.evaluations[-1].metrics, rel=1e-12)
    assert ("val/expert_dropped" in alone.evaluations[-1].metrics) == (capacity is not None)
