"""A run goes from any layout to any other: saved in one, resumed in the next, it repeats one process."""

from __future__ import annotations

import itertools

import pytest
from small_runs import largest_difference, train, train_in_plain_torch
from small_transformer import SmallTransformer

LAYOUTS = {
    "one worker": (1, {}),
    "replicate": (2, {"parallel.replicate": 2}),
    "shard": (2, {"parallel.shard": 2}),
    "tensor": (2, {"parallel.tensor": 2}),
    "pipeline": (2, {"parallel.pipeline": 2}),
    "context in a ring": (2, {"parallel.context": 2, "context.exchange": "ring"}),
    "replicate x shard": (4, {"parallel.replicate": 2, "parallel.shard": 2}),
    "shard x context": (4, {"parallel.shard": 2, "parallel.context": 2}),
    "pipeline x tensor": (4, {"parallel.pipeline": 2, "parallel.tensor": 2}),
    "shard x tensor": (4, {"parallel.shard": 2, "parallel.tensor": 2}),
}
OF_EXPERTS = {
    "one worker": (1, {}),
    "expert": (2, {"parallel.shard": 2, "parallel.expert": 2}),
    "shard": (2, {"parallel.shard": 2}),
    "expert within shard": (4, {"parallel.shard": 4, "parallel.expert": 2}),
    "context x expert": (4, {"parallel.shard": 2, "parallel.context": 2, "parallel.expert": 4}),
}
FLAGS = {"optimizer.name": "adamw", "optimizer.learning_rate": 0.003, "optimizer.clip_norm": 0.5}


def way_through_every_pair(names):
    """Names in an order in which each is followed by every other once: a circuit of Euler in the graph of all pairs."""
    left = {name: [other for other in names if other != name] for name in names}
    stack, found = [next(iter(names))], []
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            found.append(stack.pop())
    pairs = set(itertools.pairwise(found))
    assert len(pairs) == len(found) - 1 == len(names) * (len(names) - 1)
    return found[::-1]


def repeats_one_process(gloo, folder, workload, layouts, way):
    """Whether a run that takes one step in each layout of the way, resumed in the next, repeats one process."""
    for number, name in enumerate(way, start=1):
        world_size, degrees = layouts[name]
        flags = {**FLAGS, **degrees, "checkpoint.every": "1 steps", "stop.after": f"{number} steps"}
        finished = gloo.run(world_size, _continued, workload, flags, str(folder))[0]
        assert [record.step for record in finished.steps] == [number], f"{name} did not resume"
    plain = train_in_plain_torch(workload, {**FLAGS, "stop.after": f"{len(way)} steps"})
    assert largest_difference(plain.weights, finished.weights) <= 1e-9


def _continued(place, workload, flags, folder):
    return train(place, workload, flags, folder=folder)


@pytest.mark.combination
def test_a_run_goes_through_every_layout_and_back(gloo, tmp_path):
    names = list(LAYOUTS)
    repeats_one_process(gloo, tmp_path, SmallTransformer(), LAYOUTS, [*names, *names[-2::-1]])


@pytest.mark.combination
def test_a_run_with_experts_goes_through_every_layout_and_back(gloo, tmp_path):
    names = list(OF_EXPERTS)
    repeats_one_process(gloo, tmp_path, SmallTransformer(num_experts=4), OF_EXPERTS, [*names, *names[-2::-1]])


@pytest.mark.slow
@pytest.mark.parametrize(("layouts", "shape"), [(LAYOUTS, {}), (OF_EXPERTS, {"num_experts": 4})])
def test_a_run_goes_from_any_layout_to_any_other(gloo, tmp_path, layouts, shape):
    repeats_one_process(gloo, tmp_path, SmallTransformer(**shape), layouts, way_through_every_pair(layouts))
