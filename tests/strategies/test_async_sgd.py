"""Asynchronous SGD: where it must equal DDP, how late updates are, and what a meeting does. See test_gossip for who waits."""

import pytest
import torch
from small_runs import (
    Classify,
    Stepper,
    largest_difference,
    make_job,
    relative_differences,
    train,
    train_in_plain_torch,
)
from torch import nn

from scaleray.common.metric_names import CONSENSUS_DISTANCE
from scaleray.strategies.contract.parallel import known

ASYNC = {
    "strategy.name": "async_sgd", "gossip.max_staleness": 2, "gossip.meet_every": 5, "batch.drop_last": True,
    "optimizer.momentum": 0.0, "deterministic": True,
}  # fmt: skip


@pytest.mark.parametrize("world_size", [2, 4])
def test_with_no_staleness_and_plain_sgd_it_is_ddp(gloo, world_size):
    flags = {**ASYNC, "gossip.max_staleness": 0, "gossip.meet_every": 1}
    finished = gloo.run(world_size, train, Classify(), flags)[0]
    plain = train_in_plain_torch(Classify(), flags)
    assert max(relative_differences(plain.losses, finished.losses)) <= 1e-9
    assert largest_difference(plain.weights, finished.weights) <= 1e-9


def late_in_plain_torch(flags, *, staleness, world_size, num_steps):
    """All ranks' weights in one process: own updates at once, the others' `staleness` steps late, all of them an n-th."""
    job, sources = make_job(Classify(), {**flags, "strategy.name": "single"})
    plan = job.train_plan()
    start = train_in_plain_torch(Classify(), {**flags, "strategy.name": "single", "optimizer.learning_rate": 1e-300})
    models = [Classify().build_model().double() for _ in range(world_size)]
    updates = []  # by step: each rank's
    for model in models:
        model.load_state_dict(start.weights)
    for step in range(num_steps):
        made = []
        for rank, model in enumerate(models):
            batch = {
                n: torch.from_numpy(v)
                for n, v in sources["train"].read(plan.rank_indices(step, rank, world_size)).items()
            }
            total, count = job.workload.loss(model, {**batch, "x": batch["x"].double()})
            gradients = torch.autograd.grad(total / count, list(model.parameters()))
            made.append([-0.1 * g / world_size for g in gradients])
        updates.append(made)
        for rank, model in enumerate(models):
            add(model, made[rank])
            if step - staleness >= 0:
                for other in range(world_size):
                    if other != rank:
                        add(model, updates[step - staleness][other])
    return [dict(model.state_dict()) for model in models]


def add(model: nn.Module, update):
    with torch.no_grad():
        for parameter, change in zip(model.parameters(), update, strict=True):
            parameter.add_(change)


def weights_after(place, flags, num_steps):
    stepper = Stepper(place, Classify(), flags)
    found = []
    for number in range(1, num_steps + 1):
        stepper(number)
        found.append((stepper.weights, known(stepper.parallel.metrics()).get(CONSENSUS_DISTANCE.name)))
    with stepper.parallel.averaged(False):
        mean = stepper.weights
    again, sent = stepper.weights, stepper.parallel.bytes_sent()
    stepper.parallel.close()
    return found, mean, again, sent


@pytest.mark.parametrize("staleness", [1, 2])
def test_updates_of_others_are_late_by_the_staleness_if_repeatable(gloo, staleness):
    flags = {**ASYNC, "gossip.max_staleness": staleness, "gossip.meet_every": 50}
    everyone = gloo.run(2, weights_after, flags, 6)
    expected = late_in_plain_torch(flags, staleness=staleness, world_size=2, num_steps=6)
    for (found, _, again, _), own in zip(everyone, expected, strict=True):
        assert largest_difference(own, found[-1][0]) <= 1e-9
        assert all(torch.equal(again[name], found[-1][0][name]) for name in again)


def test_a_meeting_settles_all_updates_and_reports_the_distance_before(gloo):
    everyone = gloo.run(2, weights_after, ASYNC, 6)
    (first, mean, _, sent), (second, _, _, _) = everyone
    apart = [largest_difference(a, b) for (a, _), (b, _) in zip(first, second, strict=True)]
    assert min(apart[:4]) > 0 and apart[4] == 0 and apart[5] > 0
    assert [distance is None for _, distance in first] == [True] * 4 + [False] * 2 and first[4][1] > 0
    num_bytes = 8 * sum(v.numel() for v in mean.values())
    assert sent == num_bytes * (6 + 2 + 1)  # each step; the meeting measures and averages; `averaged` above


def test_the_mean_counts_what_is_under_way(gloo):
    late = gloo.run(2, weights_after, {**ASYNC, "gossip.max_staleness": 3, "gossip.meet_every": 50}, 3)
    met = gloo.run(2, weights_after, {**ASYNC, "gossip.max_staleness": 3, "gossip.meet_every": 3}, 3)
    assert largest_difference(late[0][1], met[0][1]) < 1e-12
    plain_mean = {n: (late[0][2][n] + late[1][2][n]) / 2 for n in late[0][2]}
    assert largest_difference(late[0][1], plain_mean) > 1e-4  # else the settings were no test
