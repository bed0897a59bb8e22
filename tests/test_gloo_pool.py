"""The pool itself: results by rank, errors as they were, and a working group after any of them."""

import os

import pytest
import torch
import torch.distributed as dist
from gloo_pool import SUBGROUPS_KEPT, Failure


def sum_of_ranks(place, factor):
    total = torch.tensor(place.rank * factor)
    if place.world_size > 1:
        dist.all_reduce(total)
    return place.rank, place.world_size, total.item()


def fails_on_rank_1(place):
    if place.rank == 1:
        raise LookupError("only here")
    dist.all_reduce(torch.zeros(1))  # waits for the one that is gone


@pytest.mark.parametrize("world_size", [3, 1, 2, 4])
def test_every_rank_gives_its_result_in_groups_of_any_size(gloo, world_size):
    total = 10 * sum(range(world_size))
    assert gloo.run(world_size, sum_of_ranks, 10) == [(rank, world_size, total) for rank in range(world_size)]


@pytest.mark.combination
def test_the_error_of_a_rank_arrives_and_the_next_group_works(gloo):
    outcomes = gloo.attempt(2, fails_on_rank_1)
    assert all(isinstance(outcome, Failure) for outcome in outcomes)
    assert isinstance(outcomes[1].error, LookupError)
    with pytest.raises(LookupError, match="only here"):
        gloo.run(2, fails_on_rank_1)
    assert gloo.run(2, sum_of_ranks, 1) == [(0, 2, 1), (1, 2, 1)]


def threads_with_one_more_group(place):
    group = dist.new_group()
    dist.all_reduce(torch.zeros(1), group=group)
    return len(os.listdir("/proc/self/task"))


def test_groups_that_tasks_leave_behind_do_not_pile_up(gloo):
    threads = [max(gloo.run(2, threads_with_one_more_group)) for _ in range(3 * SUBGROUPS_KEPT)]
    assert max(threads[SUBGROUPS_KEPT + 1 :]) <= max(threads[: SUBGROUPS_KEPT + 1]), threads
