"""A training in which rounding grows is judged by what rounding does to one process; its memory is freed run by run."""

import contextlib
import dataclasses
import gc
import weakref
from unittest import mock

import pytest
from small_runs import NUM_CLASSES, NUM_FEATURES, Classify, WithBatchNorm
from torch import nn
from torch.nn import functional as F
from verified import broken_strategy, found, judge, judge_with

from scaleray.strategies import ddp
from scaleray.verification.runs.compared_runs import Runs

DOUBLINGS = 19
"""A logistic map doubles a small difference each time, and does more to some: 1e-16 becomes 1e-8."""


class Chaotic(Classify):
    """A last digit of its parameters moves its results by 1e-8, as a normalisation over two nearly equal values does."""

    def build_model(self):
        class Net(nn.Sequential):
            def forward(self, x):
                result = super().forward(x)
                wild = result.detach().sigmoid()
                for _ in range(DOUBLINGS):
                    wild = 4 * wild * (1 - wild)
                return result + wild

        return Net(nn.Linear(NUM_FEATURES, 8), nn.Tanh(), nn.Linear(8, NUM_CLASSES))


def test_what_rounding_does_to_one_process_is_no_mistake_of_several(gloo):
    outcome = gloo.run(2, judge, Chaotic(), {}, 2, 2)[0]  # two steps, as the next one would double what was doubled
    assert outcome.verdict == "equal" and "rounding grows in this training" in outcome.words, outcome
    assert 1e-9 < outcome.comparison.largest < outcome.bound < 1e-6


class LossInFloat32(Classify):
    """Casts its outputs, as many models do before the softmax."""

    def loss(self, model, batch):
        return F.cross_entropy(model(batch["x"]).float(), batch["y"], reduction="sum"), len(batch["y"])


@pytest.mark.combination
def test_what_float32_inside_of_a_training_rounds_is_no_mistake_and_names_the_line(gloo):
    outcome = gloo.run(2, judge, LossInFloat32(), {})[0]
    assert outcome.verdict == "equal" and "fewer digits than float64" in outcome.words, outcome
    assert f"{__file__}:" in outcome.words and 1e-9 < outcome.comparison.largest < outcome.bound <= 1e-5


@contextlib.contextmanager
def a_little_too_small():
    def apply(*args):
        parallel = ddp.apply(*args)
        return dataclasses.replace(parallel, gradient_divisor=parallel.gradient_divisor * (1 - 1e-5))

    with broken_strategy(apply):
        yield


@pytest.mark.always("chaotic")
@pytest.mark.parametrize(
    ("workload", "cause"), [(Chaotic(), "loss normalisation"), (LossInFloat32(), "dtype")], ids=["chaotic", "float32"]
)
def test_a_mistake_is_found_in_such_a_training_as_well(gloo, workload, cause):
    outcome = gloo.run(2, judge_with, a_little_too_small, workload)[0]
    assert found(outcome)[:2] == (cause, 1)


def test_a_training_in_which_rounding_stays_small_keeps_its_bound(gloo):
    assert gloo.run(2, judge, Classify(), {})[0].bound == 1e-9


def models_after_each_run(place, strategy, resumes):
    """How many models are alive after each run of a verification, while Python looks for no circles."""
    models, counts = [], []

    class Workload(WithBatchNorm):
        def build_model(self):
            models.append(weakref.ref(model := super().build_model()))
            return model

    def run(self, *args, **options):
        try:
            return original(self, *args, **options)
        finally:
            counts.append(sum(model() is not None for model in models))

    original = Runs._run
    gc.collect()
    gc.disable()
    try:
        with mock.patch.object(Runs, "_run", run):
            outcome = judge(place, Workload(num_rows=32), {"strategy.name": strategy}, 2, resumes=resumes)
            assert outcome.verdict == "equal", outcome
    finally:
        gc.enable()
    return counts


@pytest.mark.always("fsdp-False")
@pytest.mark.parametrize(("strategy", "resumes"), [("ddp", True), ("ddp", False), ("fsdp", False)])
def test_a_verification_holds_no_model_of_a_run_that_has_ended(gloo, strategy, resumes):
    counts = gloo.run(2, models_after_each_run, strategy, resumes)
    assert len(counts[0]) >= 4 and not any(map(sum, counts)), counts
