"""Where a model is cut, and what a stage is: laws of the split, and the user's own model around its blocks."""

import itertools
import random

import pytest
import torch
from small_runs import Classify, make_job
from small_transformer import SmallTransformer
from torch import nn

from scaleray.errors import WorkloadError
from scaleray.strategies.pipeline.costs import measured_costs
from scaleray.strategies.pipeline.stages import (
    balanced_bounds,
    counted_costs,
    find_units,
    make_part,
    make_stage,
    stage_of_block,
)


@pytest.mark.parametrize("seed", range(20))
def test_a_split_is_as_even_as_any(seed):
    draw = random.Random(seed)
    costs = [draw.uniform(0.1, 5) for _ in range(draw.randint(1, 8))]
    for num_stages in range(1, len(costs) + 1):
        bounds = balanced_bounds(costs, num_stages)
        assert bounds[0] == 0 and len(bounds) == num_stages and all(a < b for a, b in itertools.pairwise(bounds))

        def worst(cuts, costs=costs):
            return max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs))))

        best = min(worst(cuts) for cuts in itertools.combinations(range(1, len(costs)), num_stages - 1))
        assert worst(tuple(bounds[1:])) == pytest.approx(best)


def test_a_large_head_takes_blocks_from_the_last_stage():
    model = SmallTransformer(num_blocks=6).build_model()
    assert balanced_bounds(counted_costs(find_units(model, list(model.blocks)), 6), 2) == [0, 3]
    model.head.weight = nn.Parameter(torch.zeros(600, 16))
    costs = counted_costs(find_units(model, list(model.blocks)), 6)
    assert balanced_bounds(costs, 2) == [0, 5]
    assert costs[0] < 1.01 * costs[1], "a lookup costs nothing"


def test_fewer_blocks_than_stages_are_refused():
    with pytest.raises(ValueError, match="2 blocks cannot make 3 stages"):
        balanced_bounds([1.0, 1.0], 3)


def test_a_chain_of_stages_is_the_model_and_shares_its_tensors():
    model = SmallTransformer().build_model()
    units, tokens = find_units(model, list(model.blocks)), torch.arange(8)[None]
    stages = stage_of_block([0, 1, 3], 4)
    assert stages == [0, 1, 1, 2]
    activation = ()
    for index in range(3):
        stage = make_stage(model, units, stages, index)
        activation = stage.run(lambda module: module(tokens), activation)
    assert torch.equal(activation, model(tokens))
    part, _ = make_part(model, units, lambda unit: stages[unit.block] == 2)
    names = dict(model.named_parameters())
    assert all(p is names[name] for name, p in part.named_parameters())
    assert next(iter(dict(part.named_parameters()))) == "embedding.weight"  # as the head's
    assert model(tokens).shape == (1, 8, 32), "the model itself is not changed"


def test_a_stage_keeps_no_parameters_of_what_other_stages_run():
    model = SmallTransformer(num_blocks=4).build_model()
    units = find_units(model, list(model.blocks))
    kept = [
        {name for name, _ in make_stage(model, units, stage_of_block([0, 2], 4), index).module.named_parameters()}
        for index in (0, 1)
    ]
    assert not kept[0] & kept[1] and kept[0] | kept[1] >= {name for name, _ in model.named_parameters()}


def test_a_stage_whose_pass_does_not_end_is_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    stage = make_stage(model, find_units(model, list(model)), [0, 1], 0)
    with pytest.raises(WorkloadError, match="without reaching the block after stage 1"):
        stage.run(lambda module: 1.0, ())


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.outer = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("blocks", "says"),
    [
        (lambda m: [m.outer, m.outer[0]], "block within a block"),
        (lambda m: [m.outer[0], m.outer[0]], "same module twice"),
        (lambda m: [m.outer[1], m.outer[0]], "in an order that differs"),
        (lambda m: [nn.Linear(2, 2)], "not parts of the model"),
    ],
)
def test_blocks_that_cannot_be_cut_apart_are_refused(blocks, says):
    model = Twice()
    with pytest.raises(WorkloadError, match=says):
        find_units(model, blocks(model))


def test_blocks_are_not_measured_on_rows_that_change_on_their_way():
    config, model = make_job(Classify())[0].config, nn.Linear(2, 2)
    changed = type("Changed", (Classify,), {"transform": lambda self, rows, rng: rows})()
    with pytest.raises(WorkloadError, match=r"changed by transform\(\).*[^$]*use pipeline.split counted"):
        measured_costs(model, [], 1, config=config, workload=changed)
