"""Arithmetic of a step: autocast trains, fp16 scales its loss, fp64 converts everything."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_runs import Classify, Tokens, make_job, rows, same_generators, train, train_alone
from torch import nn
from torch.distributed.tensor import DTensor

from scaleray.data import RankBatch
from scaleray.errors import ConfigError
from scaleray.training.setup.model_setup import prepare
from scaleray.training.step.step import TrainStep


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
        "precision.dtype": "fp16",
        "precision.initial_loss_scale": 2.0**60,
        "stop.after": "3 steps",
        "on_nonfinite": policy,
        "optimizer.clip_norm": 1.0,
    }
    finished = train_alone(Classify(), flags)
    assert finished.summary.verdict == "done" and finished.summary.nonfinite_steps == 0
    start = train_alone(Classify(), {**flags, "optimizer.learning_rate": 1e-30})
    assert all(torch.equal(finished.weights[name], start.weights[name]) for name in start.weights)


class LongRows(Tokens):
    """As many tokens a row as a language model has."""

    length = 600


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_first_fp16_step_of_a_token_model_does_not_overflow(gloo, world_size):
    flags = {"precision.dtype": "fp16", "stop.after": "2 steps", "batch.global_size": 4}
    finished = gloo.run(world_size, train, LongRows(num_rows=8), {**flags, "scale.workers": world_size})[0]
    assert [step.loss_scale for step in finished.steps] == [2.0**16] * 2  # no step was skipped
    assert np.isfinite(finished.grad_norms).all()


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


# one loss scale for all ranks


class Overflowing(nn.Module):
    """In a row marked as bad, the gradient of the last of four gates is not a number; the loss is finite."""

    def __init__(self):
        super().__init__()
        self.layer, self.gates, self.more = nn.Linear(6, 3), nn.Parameter(torch.ones(4)), nn.Linear(3, 3)

    def forward(self, x, bad):
        zero = (self.gates[3:].float() * 0).sum()
        return self.more(self.layer(x)) + (torch.sqrt(zero) if bad.any() else zero)


class PlantedOverflow(InfiniteGradientFirst):
    def build_model(self):
        return Overflowing()

    def loss(self, model, batch):
        return F.cross_entropy(model(batch["x"], batch["bad"]), batch["y"], reduction="sum"), len(batch["y"])


def steps_with_an_overflow(place, strategy, name):
    """Of the first step, in which it is: what this rank's own shards or parameters see, and what it does; then the next."""
    flags = {
        "strategy.name": strategy,
        "optimizer.name": name,
        "optimizer.learning_rate": 0.01,
        "precision.dtype": "fp16",
        "data.shuffle": False,
        "precision.initial_loss_scale": 1024.0,
        "optimizer.clip_norm": 1.0,
    }
    job, sources = make_job(PlantedOverflow(), flags, world_size=place.world_size)
    with same_generators():
        setup = prepare(job.workload, job.config, job.recipe, place)
    step = TrainStep(job.workload, setup, job.config, job.recipe, place, gives_tuples=False)
    plan, scaler, module = job.train_plan(), setup.precision.scaler, setup.parallel.module
    values = lambda: [(p.to_local() if isinstance(p, DTensor) else p).detach().clone() for p in module.parameters()]
    seen = []
    unscale = scaler._unscale_grads_

    def look(optimizer, *args):
        own = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        local = [g.to_local() if isinstance(g, DTensor) else g for g in own]
        seen.append(not all(g.isfinite().all() for g in local))
        return unscale(optimizer, *args)

    scaler._unscale_grads_ = look
    record = []
    for number in range(3):
        before = values()
        rows = sources["train"].read(plan.rank_indices(number, place.rank, place.world_size))
        step(RankBatch(number, rows, len(rows["y"])), num_rows=8, want_norm=False)
        changed = any(not torch.equal(a, b) for a, b in zip(before, values(), strict=True))
        record.append((seen.pop(), changed, scaler.get_scale()))
    setup.parallel.close()
    return record


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("strategy", ["fsdp", "zero1"])
def test_an_overflow_that_one_rank_sees_is_skipped_by_all(gloo, strategy, name):
    results = gloo.run(2, steps_with_an_overflow, strategy, name)
    assert sorted(rank[0][0] for rank in results) == [False, True]  # the plant: one rank alone sees it
    for rank in results:
        assert rank[0][1:] == (False, 512.0)  # nobody's weights move, and the scale halves everywhere
        assert rank[1:] == [(False, True, 512.0)] * 2


@pytest.mark.parametrize("strategy", ["fsdp", "zero1"])
def test_fp16_on_several_workers_stays_near_one(gloo, strategy):
    flags = {"precision.dtype": "fp16", "precision.initial_loss_scale": 1024.0, "optimizer.clip_norm": 0.3}
    several = gloo.run(2, train, Classify(num_rows=80), {**flags, "strategy.name": strategy})[0]
    alone = train_alone(Classify(num_rows=80), flags)
    assert several.losses == pytest.approx(alone.losses, rel=1e-2)
    assert several.grad_norms == pytest.approx(alone.grad_norms, rel=2e-2)


@pytest.mark.parametrize(("dtype", "says"), [("fp32", "have none"), ("fp64", "no effect")])
def test_tf32_is_refused_where_nothing_would_come_of_it(dtype, says):
    with pytest.raises(ConfigError, match=says):
        make_job(Classify(), {"precision.tf32": True, "precision.dtype": dtype})
