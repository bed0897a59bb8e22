"""Lateness under strategies whose passes communicate by themselves, and why it is missing where it is."""

from __future__ import annotations

import time

import pytest
import torch
from small_runs import Classify, train
from test_arrivals import DELAY_S, FLAGS, Napping, profile_of
from test_collectives_ledger import Chain
from torch import nn
from torch.distributed import _functional_collectives
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from scaleray.profiling.run_profile import run_profile
from scaleray.records.phases import Phase


class InPairs(Napping):
    """Blocks of which each even one is split by columns, and the one behind it by rows: a collective for each pair."""

    def tensor_plan(self, model, *, size, sequence_parallel):
        return {f"blocks.{number}": RowwiseParallel() if number % 2 else ColwiseParallel() for number in range(6)}


TENSOR = {"strategy.name": "tensor", "tensor.sequence_parallel": False}


def tensor_profile(gloo, where, ranks=2):
    finished = gloo.run(ranks, train, InPairs(where), {**FLAGS, **TENSOR})
    return run_profile([one.summary.profile for one in finished])


@pytest.mark.combination
@pytest.mark.parametrize(("where", "bucket"), [("forward", None), ("backward", 1)])
def test_a_delay_in_a_pass_of_tensor_parallelism_is_named_with_its_rank_and_layers(gloo, where, bucket):
    profile = tensor_profile(gloo, where)
    (found,) = profile.stragglers
    assert (found.rank, found.phase, found.bucket, found.layers) == (1, where, bucket, "blocks.2-3")
    waits = [rank.phases[Phase.STRAGGLER].median for rank in profile.ranks]
    assert waits[0] > DELAY_S / 2 > waits[1]


@pytest.mark.combination
def test_the_passes_of_tensor_parallelism_over_replicas_are_told_apart_and_their_waits_are_timed(gloo):
    profile = tensor_profile(gloo, "", ranks=4)
    assert not profile.stragglers and not profile.notes
    for rank in profile.ranks:
        assert {Phase.FORWARD, Phase.BACKWARD, Phase.COMMUNICATION} <= rank.phases.keys()
        assert [one.layers for one in rank.lateness] == ["blocks.4-5, head", "blocks.2-3", "blocks.0-1"]
    # all-reduces of the layers, gathers and scatters of FSDP over the replicas
    assert all(row.seconds > 0 and row.bus_bandwidth > 0 for row in profile.collectives)
    assert {row.group for row in profile.collectives} == {"tp", "dp"}


def weights_and_waits(place):
    before = _functional_collectives.wait_tensor
    finished = train(place, InPairs(), {**FLAGS, **TENSOR, "stop.after": "6 steps"})
    return finished.weights, _functional_collectives.wait_tensor is before


@pytest.mark.combination
def test_torch_waits_as_before_when_a_training_has_ended(gloo):
    for _, is_as_before in gloo.run(2, weights_and_waits):
        assert is_as_before


def test_a_pipeline_tells_its_own_work_from_waiting_and_says_why_nobody_is_late(gloo):
    finished = gloo.run(2, train, Chain(128), {**FLAGS, "strategy.name": "pipeline"})
    profile = run_profile([one.summary.profile for one in finished])
    (note,) = profile.notes
    assert "not measurable" in note and "stages run one after the other" in note
    for rank in profile.ranks:
        assert rank.late_s is None and rank.lateness == []
        own = sum(rank.phases[part].total for part in (Phase.FORWARD, Phase.BACKWARD))
        assert own > rank.phases[Phase.COPY].total and rank.phases[Phase.COMMUNICATION].total > 0
    (row,) = (row for row in profile.collectives if row.rank == 0)
    # the wait for a neighbour's work says nothing of the link
    assert (row.operation, row.bus_bandwidth, row.exposed_share) == ("send", None, 1.0) and row.seconds > 0


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"strategy.name": "local_sgd"}, "replicas train separately"),
        ({"strategy.name": "gossip"}, "replicas train separately"),
        ({"stop.after": "3 steps"}, "the training ended before"),
    ],
    ids=["local_sgd", "gossip", "three steps"],
)
def test_where_nobody_knows_how_late_ranks_are_the_record_says_why(gloo, flags, why):
    finished = gloo.run(2, train, Classify(128), {**FLAGS, **flags})
    profile = run_profile([one.summary.profile for one in finished])
    assert len(profile.notes) == 1 and "not measurable" in profile.notes[0] and why in profile.notes[0]


class OneLayer(Classify):
    """A model of which one bucket holds all, with a delay before the gradient of its only layer."""

    def build_model(self):
        return nn.Sequential(nn.Linear(6, 3))

    def loss(self, model, batch):
        logits = model(batch["x"])
        if torch.distributed.get_rank() == 1 and logits.requires_grad:
            logits.register_hook(slow)
        return super().loss(lambda rows: logits, batch)


def slow(gradient):
    time.sleep(DELAY_S)
    return gradient


@pytest.mark.combination
def test_a_straggler_of_a_model_in_one_bucket_is_named_with_the_only_layer_that_there_is(gloo):
    finished = gloo.run(2, train, OneLayer(128), {**FLAGS, "strategy.bucket_size_mib": 25})
    (found,) = run_profile([one.summary.profile for one in finished]).stragglers
    assert (found.rank, found.phase, found.bucket, found.layers) == (1, "backward", 0, "0")


def test_notes_that_all_ranks_share_stand_once(gloo):
    assert (
        profile_of(gloo, "", {"strategy.name": "diloco", "stop.after": "6 steps"})
        .notes[0]
        .startswith("lateness of ranks")
    )
