"""torch's optimizers on parameters that are whole, sharded, or of several meshes: the fastest kernels that work."""

from __future__ import annotations

import warnings
from unittest import mock

import pytest
import torch
from small_runs import Classify, RankContext, largest_difference, make_job, same_generators
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from scaleray.training.setup import optimizers

NAMES = ["adamw", "sgd", "lars", "lamb"]


def steps_of(place, name, layout):
    """Four steps of the configured optimizer: weights, and the implementation that torch was asked for."""
    job, _ = make_job(
        Classify(), {"optimizer.name": name, "optimizer.weight_decay": 0.1, "optimizer.learning_rate": 0.05}
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.LayerNorm(5), nn.Linear(5, 3)).double()
    rows = torch.randn(4, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if layout == "sharded":
        fully_shard(model, mesh=init_device_mesh("cpu", (place.world_size,)))
    elif layout == "two meshes":
        mesh = init_device_mesh("cpu", (place.world_size // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if place.world_size == 4:
            fully_shard(model, mesh=mesh["dp"])
    optimizer, _ = optimizers.build(job.workload, model, job.config, job.recipe)
    for batch in rows:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    state = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.state_dict().items()}
    kernels = {key: optimizer.defaults.get(key) for key in ("fused", "foreach")}
    return {n: p.detach().clone() for n, p in state.items()}, kernels


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("layout", "world_size"), [("sharded", 2), ("sharded", 4), ("two meshes", 2), ("two meshes", 4)]
)
def test_every_optimizer_updates_shards_as_it_updates_whole_parameters(gloo, name, layout, world_size):
    with same_generators():
        whole, kernels = steps_of(RankContext(), name, "whole")
    assert name in ("lars", "lamb") or kernels["fused"]
    for weights, kernels in gloo.run(world_size, steps_of, name, layout):
        assert largest_difference(whole, weights) < 1e-12
        if layout == "sharded":
            assert kernels == {"adamw": {"fused": True, "foreach": None}, "sgd": {"fused": None, "foreach": True}}.get(
                name, {"fused": None, "foreach": None}
            )


def test_a_first_step_that_was_skipped_brings_no_warning_and_later_ones_are_not_looked_after():
    job, _ = make_job(Classify())
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    schedule = optimizers.configured_schedule(optimizer, job.config, job.recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step()  # without a step of the optimizer before it
    with mock.patch.object(optimizers.warnings, "catch_warnings") as caught:
        optimizer.step()
        schedule.step()
    assert not caught.called and schedule.last_epoch == 2
