"""Each pair of ranks is measured when a profiled training has ended; a link that is made slow is found."""

from __future__ import annotations

import dataclasses
import time
from unittest import mock

import pytest
import torch.distributed as dist
from small_runs import Classify, make_job, train_job

from scaleray.profiling.links import slow_link
from scaleray.profiling.run_profile import run_profile
from scaleray.training.profile import link_probe

BYTES_PER_S = 1e6


def trained(place, slow, probes):
    """What a rank measured, where messages between the ranks of `slow` take their time."""
    job, sources = make_job(
        Classify(32), {"stop.after": "4 steps", "batch.global_size": 6}, world_size=place.world_size
    )
    send = dist.send

    def carried(tensor, to, **options):
        if {place.rank, to} == slow:
            time.sleep(tensor.numel() * tensor.element_size() / BYTES_PER_S)
        return send(tensor, to, **options)

    with mock.patch.object(link_probe.dist, "send", carried):
        job = dataclasses.replace(job.on(place.world_size), probes_links=probes)
        finished = train_job(place, job, sources)
    return finished.summary.profile, finished.weights


@pytest.mark.combination
def test_the_ranks_at_a_slow_link_are_found_when_the_training_has_ended(gloo):
    profile = run_profile([one for one, _ in gloo.run(3, trained, {0, 2}, True)])
    assert {(row.sender, row.receiver) for row in profile.links} == {(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)}
    found = slow_link(profile.links)
    assert found.ranks == (0, 2) and found.bytes_per_s < BYTES_PER_S < found.usual


def test_measuring_links_changes_no_bit_of_the_weights_and_a_run_does_not_do_it(gloo):
    (plain, weights), (probed, others) = (gloo.run(2, trained, set(), probes)[0] for probes in (False, True))
    assert plain.links == [] and [row.receiver for row in probed.links] == [1]
    assert weights.keys() == others.keys() and all(weights[name].equal(others[name]) for name in weights)


@pytest.mark.parametrize(
    ("nodes", "ranks"),
    [
        (["a"] * 4, [0, 1, 2, 3]),
        (["a", "a", "a", "b", "b", "b", "c", "c", "c"], [0, 3, 6]),
        (["a"] * 9, list(range(8))),
        ([str(n) for n in range(20)], list(range(8))),
    ],
    ids=["few", "nodes", "one node", "many nodes"],
)
def test_of_many_ranks_the_first_of_each_node_take_part(nodes, ranks):
    place = mock.Mock(node="a", gathered=lambda node: nodes)
    assert link_probe._taking_part(place) == ranks
