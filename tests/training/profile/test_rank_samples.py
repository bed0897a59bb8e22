"""Samples of a worker: how often they are taken, and that whoever measures their cost can turn them on and off."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from scaleray.profiling.run_profile import STEP
from scaleray.records.published import RankSample
from scaleray.training.profile.rank_samples import RankSamples

EVERY = {"samples_s": 0.0, "told_s": math.inf}
TELLS = {"samples_s": math.inf, "told_s": 0.0}
NONE = {"samples_s": math.inf, "told_s": math.inf}


class Steps:
    """Steps whose parts are known at once, of a tenth of a second each."""

    num_known = 0
    memory = SimpleNamespace(now=dict)

    def totals(self):
        return (STEP,), self.num_known, np.array([0.1 * self.num_known])


@pytest.fixture
def taken():
    """Takes so many steps; the numbers of samples and of tellings among them."""
    steps, samples, told = Steps(), [], []
    place = SimpleNamespace(rank=0, node="local", world_size=2, device=torch.device("cpu"))
    arrivals = SimpleNamespace(take_recent=list)
    watched = RankSamples(
        place, steps, arrivals, every_s=5.0, tell=told.append, emit=samples.append,
        guard=lambda watcher, look, otherwise, part="": look(),
    )  # fmt: skip

    def take(count, **intervals):
        if intervals:
            watched.set_intervals(**intervals)
        before = len(samples), len(told)
        for _ in range(count):
            steps.num_known += 1
            watched.after_step(SimpleNamespace(step=steps.num_known))
        assert all(isinstance(sample, RankSample) for sample in samples)
        return len(samples) - before[0], len(told) - before[1]

    return take


def test_a_run_takes_its_first_sample_at_once_and_the_next_ones_at_intervals(taken):
    assert taken(20) == (1, 1)


def test_samples_can_be_had_at_every_step_and_at_none_and_again(taken):
    taken(1)
    assert [taken(10, **EVERY), taken(10, **NONE), taken(10, **TELLS), taken(10, **EVERY)] == [
        (10, 0),
        (0, 0),
        (0, 10),
        (10, 0),
    ]
