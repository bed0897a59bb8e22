"""Who comes late to the collectives of a step: a delay that is planted in one rank is named with its rank and layers."""

from __future__ import annotations

import contextlib
import math
import time
from unittest import mock

import pytest
import torch
from small_runs import NUM_CLASSES, NUM_FEATURES, Classify, train
from torch import nn

from scaleray.profiling.run_profile import run_profile
from scaleray.records.phases import Phase
from scaleray.training.profile.arrival_recording import ArrivalTimes, DeviceStamps, StepMoments

DELAY_S = 0.06
STEPS = 32


class Sleeps(torch.autograd.Function):
    """Nothing at all, for a long time."""

    @staticmethod
    def forward(ctx, values):
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(DELAY_S)
        return gradient


class Nap(nn.Module):
    """Sleeps in the passes that it is told to, on rank 1."""

    def __init__(self, where):
        super().__init__()
        self.where = where

    def forward(self, values):
        if not self.training or torch.distributed.get_rank() != 1 or not torch.is_grad_enabled():
            return values
        if self.where == "forward":
            time.sleep(DELAY_S)
        return Sleeps.apply(values) if self.where == "backward" else values


class Blocks(nn.Module):
    def __init__(self, where):
        super().__init__()
        self.embed = nn.Linear(NUM_FEATURES, 16)
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(6)])
        self.nap = Nap(where)
        self.head = nn.Linear(16, NUM_CLASSES)

    def forward(self, x):
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            if number == 2:
                x = self.nap(x)
        return self.head(x)


class Napping(Classify):
    """A model of six blocks, with a nap behind the third one."""

    def __init__(self, where=""):
        super().__init__(num_rows=4 * STEPS)
        self.where = where

    def build_model(self):
        return Blocks(self.where)

    def blocks(self, model):
        return list(model.blocks)


FLAGS = {"batch.global_size": 4, "stop.after": f"{STEPS} steps", "strategy.bucket_size_mib": 2e-3}
"""A bucket for each block, of 2 KB."""
STRATEGIES = {
    "ddp": ({}, "blocks.2"),
    "one bucket": ({"strategy.bucket_size_mib": 25}, "blocks.2"),
    "zero1": ({"strategy.name": "zero1"}, "blocks.2"),
    "fsdp": ({"strategy.name": "fsdp"}, "blocks.2"),
    "compressed": ({"compression.name": "bf16", "precision.dtype": "fp32"}, "blocks.2-3"),
    "fixed buckets": ({"deterministic": True, "batch.micro_size": 1}, "blocks.2-3"),
}


def profile_of(gloo, where, flags):
    finished = gloo.run(2, train, Napping(where), {**FLAGS, **flags})
    return run_profile([one.summary.profile for one in finished])


@pytest.mark.always("one bucket")
@pytest.mark.parametrize(("flags", "layers"), STRATEGIES.values(), ids=STRATEGIES)
def test_a_delay_in_the_backward_pass_of_a_rank_is_named_with_its_rank_and_layers(gloo, flags, layers):
    profile = profile_of(gloo, "backward", flags)
    found = profile.stragglers[0]
    assert (found.rank, found.phase, found.layers) == (1, "backward", layers)
    assert {one.rank for one in profile.stragglers} == {1}
    # who waits is the other one
    waits = [rank.phases[Phase.STRAGGLER].median for rank in profile.ranks]
    assert waits[0] > DELAY_S / 2 > waits[1]
    assert profile.ranks[1].lateness[found.bucket].late_s.median > DELAY_S / 2
    # in single steps a busy machine delays the other rank for longer
    assert profile.ranks[1].lateness[found.bucket].last_share > 2 / 3


@pytest.mark.combination
@pytest.mark.parametrize(("strategy", "layers"), [("ddp", ""), ("fsdp", "blocks.2")])
def test_a_delay_in_the_forward_pass_is_named_as_one_of_the_forward_pass(gloo, strategy, layers):
    (found,) = profile_of(gloo, "forward", STRATEGIES[strategy][0]).stragglers
    assert (found.rank, found.phase, found.bucket, found.layers) == (1, "forward", None, layers)


@pytest.mark.always("ddp")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_in_a_healthy_run_nobody_is_named_and_lateness_is_measured_all_the_same(gloo, strategy):
    profile = profile_of(gloo, "", STRATEGIES[strategy][0])
    assert profile.stragglers == []
    for rank in profile.ranks:
        assert rank.late_s is not None and len(rank.late_s.series) == profile.buckets.count
        assert [one.layers for one in rank.lateness][:1] == ["blocks.5" if strategy == "fsdp" else "blocks.5, head"]


def weights(place, flags, is_watched):
    no_look = mock.patch.object(ArrivalTimes, "after_launch", return_value=None)
    with contextlib.nullcontext() if is_watched else no_look:
        finished = train(place, Napping(), {**FLAGS, "stop.after": "8 steps", **flags})
    return finished.weights, finished.summary.profile.arrivals is not None


@pytest.mark.always("True")
@pytest.mark.parametrize(
    "flags",
    [
        {"batch.micro_size": 1, "strategy.gradient_as_bucket_view": True},
        {"strategy.gradient_as_bucket_view": False, "strategy.find_unused_parameters": True},
        {"strategy.static_graph": True, "batch.micro_size": None},
        {"compression.name": "powersgd", "precision.dtype": "fp32"},
        {"strategy.name": "zero1"},
        {"strategy.name": "fsdp", "batch.micro_size": 1},
    ],
    ids=lambda flags: next(iter(flags.values())),
)
def test_arrivals_change_no_bit_of_the_weights(gloo, flags):
    (with_them, are_there), (without, are_left_out) = (gloo.run(2, weights, flags, look)[0] for look in (True, False))
    assert are_there and not are_left_out
    assert with_them.keys() == without.keys()
    assert all(torch.equal(value, without[name]) for name, value in with_them.items())


def test_events_of_a_device_are_read_when_it_has_passed_them_and_used_again():
    passed = []

    class Event:
        def __init__(self):
            self.at = 0.0

        def record(self):
            self.at = clock.pop(0)

        def query(self):
            return self in passed

        def elapsed_time(self, other):
            return other.at - self.at

        def synchronize(self):
            passed.append(self)

    clock = [1000.0, 1004.0, 1010.0, 2000.0]
    stamps = DeviceStamps(Event)
    begun, ready, met = (stamps.now() for _ in range(3))
    stamps.add(StepMoments(7, begun, met, [ready, math.nan], []))
    assert stamps.next_known() is None
    stamps.wait()
    number, begin, met, *came = stamps.next_known()
    # milliseconds of events become seconds, and the end of the step is moment 0
    assert (number, begin, met, came[0]) == (7, -0.01, 0.0, -0.006)
    assert math.isnan(came[1])
    assert stamps.now() in (begun, ready, met)


def test_passes_of_earlier_micro_batches_count_with_the_layers_in_which_they_took_their_time():
    earlier = [(10.0, 10.5, [10.1, 10.4]), (11.0, 11.5, [math.nan, 11.4])]
    step = StepMoments(3, 12.0, 13.0, [12.2, 12.6], earlier)
    number, begun, met, first, second = step.row(lambda begin, end: end - begin, 13.0)
    assert number == 3
    # two passes of half a second before the last one, of which 0.1 and 0.4 + 0.4 seconds passed before the places
    assert (begun, met) == (11.0, 13.0)
    assert (first, second) == (pytest.approx(11.3), pytest.approx(12.4))
