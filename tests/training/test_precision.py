"""Arithmetic of a step: autocast trains, fp16 scales its loss, fp64 converts everything."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_runs import Classify, rows, train_alone
from torch import nn


class SeesDtypes(Classify):
    """Notes the types of inputs, outputs and gradients."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seen = []

    def loss(self, model, batch):
        logits = model(batch["x"])
        self.seen.append((batch["x"].dtype, logits.dtype, next(model.parameters()).dtype, batch["y"].dtype))
        return F.cross_entropy(logits, batch["y"], reduction="sum"), len(batch["y"])


@pytest.mark.parametrize(
    ("dtype", "inputs", "outputs", "parameters"),
    [
        ("fp32", torch.float32, torch.float32, torch.float32),
        ("bf16", torch.float32, torch.bfloat16, torch.float32),
        ("fp16", torch.float32, torch.float16, torch.float32),
        ("fp64", torch.float64, torch.float64, torch.float64),
    ],
)
def test_every_precision_trains_in_its_own_types(dtype, inputs, outputs, parameters):
    workload = SeesDtypes(num_rows=64, num_val=8)
    finished = train_alone(workload, {"precision.dtype": dtype, "stop.after": "10 epochs"})
    assert set(workload.seen) == {(inputs, outputs, parameters, torch.int64)}  # labels are never converted
    assert sum(finished.losses[-8:]) < 0.5 * sum(finished.losses[:8])
    assert finished.evaluations[-1].metrics["val/accuracy"] > 0.7
    assert all(value.dtype == parameters for value in finished.weights.values())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_stays_near_single_precision(dtype):
    """bf16 keeps 8 bits of a number, fp16 11: after 20 steps the losses agree to about 1 %."""
    half, full = (train_alone(Classify(num_rows=80), {"precision.dtype": d}) for d in (dtype, "fp32"))
    assert half.losses != full.losses
    assert half.losses == pytest.approx(full.losses, rel=0.03)


def test_only_fp16_has_a_loss_scale_and_it_halves_where_gradients_overflow():
    for dtype in ("fp32", "bf16", "fp64"):
        assert {step.loss_scale for step in train_alone(Classify(), {"precision.dtype": dtype}).steps} == {None}
    calm = train_alone(Classify(), {"precision.dtype": "fp16", "precision.initial_loss_scale": 1024.0})
    assert {step.loss_scale for step in calm.steps} == {1024.0}
    flags = {"precision.dtype": "fp16", "precision.initial_loss_scale": 2.0**40, "stop.after": "40 steps"}
    overflowing = train_alone(Classify(num_rows=80), flags)
    scales = [step.loss_scale for step in overflowing.steps]
    assert scales[0] == 2.0**39
    assert all(after in (before, before / 2) for before, after in itertools.pairwise(scales))
    assert scales[-1] == scales[-2] < 2.0**30  # low enough, and then it trains
    assert overflowing.losses[-1] < overflowing.losses[0]


class InfiniteGradientFirst(Classify):
    """The gradient of the first batch is infinite, and its loss is not: the square root of zero."""

    def loss(self, model, batch):
        total, count = super().loss(model, batch)
        zero = (model(batch["x"]).float() * 0).sum()
        return total + (torch.sqrt(zero) if batch["bad"].any() else zero), count

    def datasets(self):
        return {"train": {**rows(32), "bad": np.arange(32) == 0}}


class WithoutTheFirst(InfiniteGradientFirst):
    def datasets(self):
        return {"train": {name: values[8:] for name, values in super().datasets()["train"].items()}}


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_first_step_that_overflows_leaves_the_optimizer_as_new(name):
    """The rest of the run is the run that starts one batch later."""
    flags = {"precision.dtype": "fp16", "optimizer.name": name, "data.shuffle": False, "stop.after": "1 epochs"}
    expected = train_alone(WithoutTheFirst(), {**flags, "precision.initial_loss_scale": 1024.0})
    overflows = train_alone(InfiniteGradientFirst(), {**flags, "precision.initial_loss_scale": 2048.0})
    assert [step.loss_scale for step in overflows.steps] == [1024.0] * 4
    assert overflows.losses[1:] == expected.losses
    assert all(torch.equal(overflows.weights[n], expected.weights[n]) for n in expected.weights)


@pytest.mark.parametrize("policy", ["raise", "stop", "skip"])
def test_an_overflow_of_the_scaled_loss_is_no_failure_and_leaves_the_weights(policy):
    """The scaler skips the step, whatever the config says about losses that are not finite."""
    flags = {
        "precision.dtype": "fp16", "precision.initial_loss_scale": 2.0**60, "stop.after": "3 steps", "on_nonfinite": policy,
        "optimizer.clip_norm": 1.0,
    }  # fmt: skip
    finished = train_alone(Classify(), flags)
    assert finished.summary.verdict == "done" and finished.summary.nonfinite_steps == 0
    start = train_alone(Classify(), {**flags, "optimizer.learning_rate": 1e-30})
    assert all(torch.equal(finished.weights[name], start.weights[name]) for name in start.weights)


def test_the_loss_scale_changes_nothing_but_the_rounding():
    losses = [
        train_alone(Classify(num_rows=80), {"precision.dtype": "fp16", "precision.initial_loss_scale": scale}).losses
        for scale in (256.0, 4096.0)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_the_gradient_norm_of_fp16_is_that_of_the_unscaled_gradient():
    norms = {
        dtype: train_alone(Classify(), {"precision.dtype": dtype, "precision.initial_loss_scale": 1024.0}).grad_norms
        for dtype in ("fp16", "fp32")
    }
    assert norms["fp16"] == pytest.approx(norms["fp32"], rel=0.02)


def test_fp64_converts_buffers_too():
    workload = Classify(num_rows=32)
    workload.build_model = lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    weights = train_alone(workload).weights
    assert weights["1.running_mean"].dtype == torch.float64 and weights["1.num_batches_tracked"].dtype == torch.int64
