"""How long ranks wait for each other: longer until the first step is complete, and never less than for their input."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from small_runs import Classify, make_job, train
from torch.distributed.distributed_c10d import _world

from scaleray.data import Input
from scaleray.strategies.apart.in_flight_exchanges import BESIDE_TRAINING
from scaleray.training import loop
from scaleray.training.health.worker_progress import WATCHDOG_SHARE, Progress
from scaleray.training.setup.rank_context import RankContext

LIMIT_S = 37.0
FLAGS = {"stop.after": "3 steps", "scale.collective_timeout_s": LIMIT_S}


def limits():
    """Of the groups of this rank by description, in seconds."""
    found = {}
    for group in _world.pg_map:
        limit = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        found.setdefault(group.group_desc, set()).add(limit)
    return found


class Watching(Classify):
    """Notes the limits in each loss."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def loss(self, model, batch):
        self.seen.append(limits())
        return super().loss(model, batch)


def limits_of_a_run(place, flags):
    workload = Watching()
    train(place, workload, {**FLAGS, **flags})
    # in the first batch's check, the first step, the last one, and afterwards
    return [workload.seen[0], workload.seen[3], workload.seen[-1], limits()]


def all_of(found):
    return set.union(*(values for name, values in found.items() if name != BESIDE_TRAINING))


@pytest.mark.combination
@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (2, {}),
        (2, {"compression.name": "powersgd"}),
        (4, {"strategy.name": "tensor", "parallel.tensor": 2}),
        (2, {"strategy.name": "async_sgd"}),
    ],
    ids=["ddp", "a group of its own", "a mesh of two axes", "exchanges during training"],
)
def test_all_groups_have_the_limit_of_the_config_once_the_first_step_is_complete(gloo, world_size, flags):
    check, first, last, after = gloo.run(world_size, limits_of_a_run, flags)[0]
    assert all_of(check) == all_of(first) == {3 * LIMIT_S}
    assert all_of(last) == all_of(after) == {LIMIT_S}
    if "async_sgd" in flags.values():
        assert min(last[BESIDE_TRAINING]) > LIMIT_S


def waits_of_a_run(place):
    """How long this rank waits for a batch at most, by the number of steps that are complete."""
    job, sources = make_job(Classify(num_val=8), {**FLAGS, "data.timeout_s": 1000}, world_size=place.world_size)
    progress, opened, seen, real = Progress(), [], {}, Input.open

    def open_and_keep(self, split, part, *more):
        opened.append(real(self, split, part, *more))
        return opened[-1]

    def emit(message):
        seen[progress.steps_done] = {stream._others_wait_s() for stream in opened}

    enter = progress.enter
    progress.enter = lambda phase: (enter(phase), emit(None))
    with mock.patch.object(Input, "open", open_and_keep):
        loop.run(job, place, sources=sources, emit=emit, progress=progress)
    return seen


@pytest.mark.combination
def test_a_rank_waits_for_its_input_less_long_than_the_others_wait_for_it(gloo):
    for seen in gloo.run(2, waits_of_a_run):
        assert seen == {done: {WATCHDOG_SHARE * (LIMIT_S * (1 if done else 3))} for done in range(4)}
    assert all(waits == {math.inf} for waits in waits_of_a_run(RankContext()).values()), "nobody waits for it"
