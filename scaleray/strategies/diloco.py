"""DiLoCo: replicas take many steps apart, and an outer optimizer then takes one step with the mean of their changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from scaleray.config import RunConfig
from scaleray.strategies.contract.parallel import Parallel, Tensors
from scaleray.strategies.local_sgd import TrainingApart
from scaleray.strategies.sharding.shards import local

ANCHOR, MOMENTUM = "anchor", "momentum"


def apply(model: nn.Module, mesh: DeviceMesh | None, config: RunConfig, workload: Any) -> Parallel:
    """Take local steps with the configured optimizer, and an outer Nesterov step every `local_sgd.sync_every` steps.
    Collective.

    The outer gradient is the mean over the replicas of how far parameters have moved, from the anchor back; the outer
    step moves the anchor, from which all replicas continue. Inner optimizers keep their own state; buffers are
    averaged. The outer momentum and the anchor, a copy of the trained parameters each, are part of a checkpoint; on
    another number of workers the momentum starts from zero and the anchor is the mean of the replicas. With
    outer_learning_rate 1 and outer_momentum 0 it is local SGD without `average_momentum`. Source: Douillard et al.
    2023, arXiv:2311.08105.
    """
    settings = config.local_sgd
    apart = TrainingApart(model, mesh, config, workload)
    trained = apart.replicas.trained
    names = [name for name, parameter in apart.model.named_parameters() if parameter.requires_grad]
    anchor: list[torch.Tensor] = []
    momentum: list[torch.Tensor] = []

    def begin() -> None:
        if not anchor:  # else they came from a checkpoint
            anchor.extend(local(parameter.detach()).clone() for parameter in trained)
            momentum.extend(torch.zeros_like(value) for value in anchor)

    @torch.no_grad()
    def synchronise() -> None:
        apart.replicas.average()
        values = [local(parameter.detach()) for parameter in trained]
        outer_gradient = [start - mean for start, mean in zip(anchor, values, strict=True)]
        torch._foreach_mul_(momentum, settings.outer_momentum)
        torch._foreach_add_(momentum, outer_gradient)
        torch._foreach_add_(
            outer_gradient, momentum, alpha=settings.outer_momentum
        )  # Nesterov, as torch.optim.SGD has it
        torch._foreach_add_(anchor, outer_gradient, alpha=-settings.outer_learning_rate)
        torch._foreach_copy_(values, anchor)

    def state() -> Tensors:
        saved = {f"{ANCHOR}.{name}": value for name, value in zip(names, anchor, strict=bool(anchor))}
        return saved | {f"{MOMENTUM}.{name}": value for name, value in zip(names, momentum, strict=bool(momentum))}

    def load_state(saved: Tensors) -> None:
        if saved:
            anchor[:] = [saved[f"{ANCHOR}.{n}"].to(p.device, copy=True) for n, p in zip(names, trained, strict=True)]
            momentum[:] = [
                saved[f"{MOMENTUM}.{n}"].to(p.device, copy=True) for n, p in zip(names, trained, strict=True)
            ]

    return apart.parallel(
        synchronise=synchronise,
        synchronise_node=lambda node: apart.replicas.average(group=node),
        begin=begin,
        state=state,
        load_state=load_state,
    )
