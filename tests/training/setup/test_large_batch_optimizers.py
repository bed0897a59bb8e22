"""LARS and LAMB: the papers' formulas, and the same training whether parameters are whole or sharded."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from small_runs import (
    Classify,
    RankContext,
    Tokens,
    largest_difference,
    make_job,
    relative_differences,
    same_generators,
    train,
    train_alone,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from scaleray.errors import ConfigError
from scaleray.training.setup.large_batch_optimizers import Lamb, Lars, norms_of_whole

pytestmark = pytest.mark.combination  # a feature that few commits touch: its tests take turns

NAMES = {"lars": Lars, "lamb": Lamb}


def norm(x):
    return np.sqrt((x * x).sum())


def lars_by_the_paper(w, gradients, *, rates, momentum, decay, trust):
    """Algorithm 1 of arXiv:1708.03888."""
    v = np.zeros_like(w)
    for g, rate in zip(gradients, rates, strict=True):
        local = trust * norm(w) / (norm(g) + decay * norm(w))
        v = momentum * v + rate * local * (g + decay * w)
        w = w - v
    return w


def lamb_by_the_paper(w, gradients, *, rates, betas, eps, decay):
    """Algorithm 2 of arXiv:1904.00962."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        r = m / (1 - betas[0] ** t) / (np.sqrt(v / (1 - betas[1] ** t)) + eps) + decay * w
        w = w - rate * norm(w) / norm(r) * r
    return w


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_steps_are_those_of_the_paper(name, decay):
    draw = np.random.default_rng(3)
    starts = [draw.normal(size=(4, 3)), draw.normal(size=(5, 2, 2))]
    gradients = [[draw.normal(size=w.shape) for _ in range(6)] for w in starts]
    rates = [0.3, 0.6, 0.9, 0.5, 0.2, 0.1]  # a schedule: the rate belongs into LARS's buffer
    parameters = [nn.Parameter(torch.from_numpy(w.copy())) for w in starts]
    if name == "lars":
        optimizer = Lars(parameters, 1.0, momentum=0.8, weight_decay=decay, trust_coefficient=0.02)
        settings = {"momentum": 0.8, "trust": 0.02}
    else:
        optimizer = Lamb(parameters, 1.0, betas=(0.8, 0.95), eps=1e-6, weight_decay=decay)
        settings = {"betas": (0.8, 0.95), "eps": 1e-6}
    for step, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        for parameter, own in zip(parameters, gradients, strict=True):
            parameter.grad = torch.from_numpy(own[step].copy())
        optimizer.step()
    formula = lars_by_the_paper if name == "lars" else lamb_by_the_paper
    for parameter, w, own in zip(parameters, starts, gradients, strict=True):
        expected = formula(w, own, rates=rates, decay=decay, **settings)
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-13)


def test_zero_weights_and_zero_gradients_take_the_plain_step():
    zero, still = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.ones(2, 2))
    zero.grad, still.grad = torch.full((2, 2), 3.0), torch.zeros(2, 2)
    Lars([zero, still], 0.1, momentum=0.0).step()
    assert torch.allclose(zero, torch.full((2, 2), -0.3)) and torch.equal(still, torch.ones(2, 2))
    zero, still = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.ones(2, 2))
    zero.grad, still.grad = torch.full((2, 2), 3.0), torch.zeros(2, 2)
    Lamb([zero, still], 0.1).step()
    assert torch.allclose(zero, torch.full((2, 2), -0.1)) and torch.equal(still, torch.ones(2, 2))


@pytest.mark.parametrize("name", NAMES)
def test_groups_that_do_not_adapt_take_the_step_of_the_plain_optimizer(name):
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64)) for _ in range(2))
    ours.grad, theirs.grad = (torch.linspace(0.3, 2, 6, dtype=torch.float64) for _ in range(2))
    if name == "lars":
        optimizer = Lars([{"params": [ours], "adaptive": False}], 0.1, momentum=0.9)
        plain = torch.optim.SGD([theirs], 0.1, momentum=0.9)
    else:
        optimizer = Lamb([{"params": [ours], "adaptive": False}], 0.1, eps=1e-8)
        plain = torch.optim.AdamW([theirs], 0.1, weight_decay=0.0)
    for _ in range(3):
        optimizer.step()
        plain.step()
    assert torch.allclose(ours, theirs, rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_without_a_gradient_stay_and_sparse_ones_are_refused(name):
    trained, other = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = NAMES[name]([trained, other], 0.1)
    optimizer.step()
    assert not optimizer.state
    trained.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(other, torch.ones(2, 2)) and not torch.equal(trained, torch.ones(2, 2))
    other.grad = torch.ones(2, 2).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_trains(name, dtype):
    parameter = nn.Parameter(torch.full((64, 64), 1e-3, dtype=dtype))
    parameter.grad = torch.full((64, 64), 1e-12, dtype=dtype)
    before = parameter.detach().clone()
    optimizer = (
        Lars([parameter], 1.0, momentum=0.0, trust_coefficient=0.5)
        if name == "lars"
        else Lamb([parameter], 0.5, eps=1e-20)
    )
    optimizer.step()
    assert parameter.dtype == dtype
    assert torch.allclose(parameter.float(), before.float() / 2, rtol=1e-2)


# shards


class Uneven(nn.Module):
    """Rows that 4 ranks cannot share evenly, fewer rows than ranks, a bias, and a frozen layer."""

    def __init__(self, inner):
        super().__init__()
        self.first, self.second = nn.Linear(6, inner), nn.Linear(inner, 3)
        self.third = nn.Linear(3, 2, bias=False)
        self.second.weight.requires_grad_(False)

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def optimizer_of(name, model):
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.05},
        {"params": [p for p in trained if p.ndim == 1], "adaptive": False},
    ]
    return Lars(groups, 0.5, trust_coefficient=0.1) if name == "lars" else Lamb(groups, 0.05)


TENSOR_PLAN = {"first": ColwiseParallel, "second": RowwiseParallel}


def steps_of(place, name, layout, inner):
    """Five steps on the same rows on all ranks: (weights, number of all-reduces of the optimizer)."""
    torch.manual_seed(0)
    model = Uneven(inner).double()
    rows = torch.randn(5, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    half = place.world_size // 2
    if layout == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (place.world_size,)))
    elif layout == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, half), mesh_dim_names=("replicate", "shard")))
    elif layout == "tensor":
        mesh = init_device_mesh("cpu", (place.world_size,))
        parallelize_module(model, mesh, {layer: style() for layer, style in TENSOR_PLAN.items()})
    elif layout == "2d":
        mesh = init_device_mesh("cpu", (2, half), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {layer: style() for layer, style in TENSOR_PLAN.items()})
        fully_shard(model, mesh=mesh["dp"])
    optimizer = optimizer_of(name, model)
    counted = mock.Mock(wraps=dist.all_reduce)
    for batch in rows:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        with mock.patch.object(dist, "all_reduce", counted):
            optimizer.step()
    state = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.state_dict().items()}
    return {n: p.detach().clone() for n, p in state.items()}, counted.call_count


@pytest.mark.each_value
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("layout", "world_size"), [("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("tensor", 2), ("2d", 4)])
def test_sharded_parameters_train_like_whole_ones(gloo, name, layout, world_size):
    inner = 7 if layout in ("fsdp", "hsdp") else 8  # tensor parallelism cuts it
    with same_generators():
        whole, none = steps_of(RankContext(), name, "whole", inner)
    assert none == 0
    for weights, calls in gloo.run(world_size, steps_of, name, layout, inner):
        assert largest_difference(whole, weights) < 1e-12
        if layout in ("fsdp", "hsdp"):
            assert calls == 5  # one a step for all parameters together


def sharded_norms(place):
    mesh = init_device_mesh("cpu", (place.world_size,))
    whole = [torch.arange(12.0).reshape(3, 4), torch.ones(5), torch.full((2, 2), 3.0)]
    laid_out = [
        distribute_tensor(whole[0], mesh, [Shard(0)]),
        distribute_tensor(whole[1], mesh, [Replicate()]),
        whole[2],
    ]
    return norms_of_whole([t.to_local() if isinstance(t, DTensor) else t for t in laid_out], laid_out), whole


def test_norms_are_those_of_the_whole_tensors(gloo):
    for norms, whole in gloo.run(4, sharded_norms):
        assert torch.allclose(norms, torch.tensor([t.norm().item() for t in whole], dtype=torch.float64))


# from a config


FLAGS = {"optimizer.learning_rate": 0.05, "optimizer.weight_decay": 0.01, "optimizer.clip_norm": 1.0}


def flags_for(name, **more):
    own = {"optimizer.trust_coefficient": 0.5} if name == "lars" else {}
    return {**FLAGS, "optimizer.name": name, **own, **more}


@pytest.mark.each_value
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_config_trains_the_same_on_one_and_two_workers(gloo, name, strategy):
    alone = train_alone(Tokens(), flags_for(name))
    finished = gloo.run(2, train, Tokens(), flags_for(name, **{"strategy.name": strategy}))[0]
    assert max(relative_differences(alone.losses, finished.losses)) < 1e-9
    assert largest_difference(alone.weights, finished.weights) < 1e-9
    assert alone.losses[-1] < alone.losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_biases_are_left_out_unless_asked_for(name):
    flags = flags_for(name, **{"stop.after": "1 steps", "optimizer.clip_norm": None})
    decayed = train_alone(Classify(), flags)
    plain = train_alone(Classify(), {**flags, "optimizer.weight_decay": 0.0})
    adapted = train_alone(Classify(), {**flags, "optimizer.adapt_vectors": True})
    assert torch.equal(decayed.weights["0.bias"], plain.weights["0.bias"])
    assert not torch.equal(decayed.weights["0.weight"], plain.weights["0.weight"])
    assert torch.equal(decayed.weights["0.weight"], adapted.weights["0.weight"])
    assert not torch.equal(decayed.weights["0.bias"], adapted.weights["0.bias"])


def interrupted(place, flags, folder, kill_at):
    return train(place, Classify(num_rows=40), flags, folder=folder, kill_at=kill_at)


@pytest.mark.each_value
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("strategy", "before", "after"), [("ddp", 1, 1), ("fsdp", 2, 2), ("fsdp", 4, 2), ("fsdp", 2, 1)]
)
def test_a_run_resumes_with_its_momentum(gloo, tmp_path, name, strategy, before, after):
    flags = flags_for(name, **{"strategy.name": strategy, "checkpoint.every": "2 steps", "deterministic": True})
    whole = gloo.run(before, interrupted, flags, None, None)[0]
    gloo.run(before, interrupted, flags, str(tmp_path), 5)
    resumed = gloo.run(after, interrupted, flags, str(tmp_path), None)[0]
    assert resumed.steps[0].step == 5
    bound = 0 if before == after else 1e-12
    assert max(relative_differences(whole.losses[4:], resumed.losses)) <= bound
    assert largest_difference(whole.weights, resumed.weights) <= bound


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ({"optimizer.name": "lamb", "optimizer.rule": "linear", "optimizer.reference_batch_size": 4}, "optimizer.rule"),
        ({"optimizer.name": "lars", "optimizer.rule": "adam", "optimizer.reference_batch_size": 4}, "optimizer.rule"),
        ({"optimizer.name": "lamb", "optimizer.trust_coefficient": 0.1}, "optimizer.trust_coefficient"),
        ({"optimizer.name": "sgd", "optimizer.adapt_vectors": True}, "optimizer.adapt_vectors"),
        ({"optimizer.name": "lars", "optimizer.nesterov": True}, "optimizer.nesterov"),
    ],
)
def test_settings_of_other_optimizers_are_refused(flags, key):
    with pytest.raises(ConfigError) as raised:
        make_job(Classify(), flags)
    assert raised.value.key == key


@pytest.mark.parametrize(("name", "rule"), [("lars", "linear"), ("lars", "legw"), ("lamb", "sqrt"), ("lamb", "legw")])
def test_the_rules_that_were_made_for_them_are_taken(name, rule):
    job, _ = make_job(Classify(), {"optimizer.name": name, "optimizer.rule": rule, "optimizer.reference_batch_size": 4})
    assert job.recipe.learning_rate == pytest.approx(0.1 * (2 if rule == "linear" else 2**0.5))
