"""The configured optimizer with the derived learning rate, and the schedule that moves it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from scaleray.config import RunConfig
from scaleray.errors import WorkloadError
from scaleray.scaling.recipe import Recipe
from scaleray.scaling.schedules import learning_rate_factor


@dataclass(frozen=True)
class OptimizerValues:
    """What a workload's own `optimizer` receives: the configured values with the batch-size rule applied."""

    name: str
    learning_rate: float
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float
    momentum: float
    nesterov: bool


def build(
    workload: Any, model: nn.Module, config: RunConfig, recipe: Recipe, *, owns: Callable[[nn.Parameter], bool] = lambda p: True
) -> torch.optim.Optimizer:  # fmt: skip
    """The workload's own optimizer, or the configured one over all parameters that need a gradient; of those, it keeps
    the ones that this rank owns."""
    optimizer = _build(workload, model, config, recipe)
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if owns(p)]
    return optimizer


def _build(workload: Any, model: nn.Module, config: RunConfig, recipe: Recipe) -> torch.optim.Optimizer:
    settings = config.optimizer
    values = OptimizerValues(
        name=settings.name,
        learning_rate=recipe.learning_rate,
        betas=recipe.betas,
        epsilon=recipe.epsilon,
        weight_decay=settings.weight_decay,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
    )
    own = workload.optimizer(model, values) if callable(getattr(workload, "optimizer", None)) else None
    if own is not None:
        if not isinstance(own, torch.optim.Optimizer):
            raise WorkloadError("optimizer()", type(own).__name__, "it must return a torch.optim.Optimizer or None")
        return own
    trained = [p for p in model.parameters() if p.requires_grad]
    # fused: one kernel for all parameters, on the CPU too; it needs floating-point parameters on one device type
    fused = all(p.is_floating_point() for p in trained)
    if settings.name == "sgd":
        # torch 2.13: a first step that the loss scaler skips leaves the momentum of fused SGD uninitialised
        fused = fused and config.precision.dtype != "fp16"
        # and DTensor has no fused SGD; AdamW it has
        fused = fused and not any(isinstance(p, DTensor) for p in trained)
        return torch.optim.SGD(
            trained,
            lr=values.learning_rate,
            momentum=values.momentum,
            nesterov=values.nesterov,
            weight_decay=values.weight_decay,
            fused=fused,
        )
    return torch.optim.AdamW(
        trained,
        lr=values.learning_rate,
        betas=values.betas,
        eps=values.epsilon,
        weight_decay=values.weight_decay,
        fused=fused,
    )


def build_schedule(
    optimizer: torch.optim.Optimizer, config: RunConfig, recipe: Recipe
) -> torch.optim.lr_scheduler.LambdaLR:
    """The schedule over steps, relative to each parameter group's own learning rate."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: learning_rate_factor(
            step,
            name=config.schedule.name,
            warmup_steps=recipe.warmup_steps,
            schedule_steps=recipe.schedule_steps,
            final_ratio=config.schedule.final_ratio,
        ),
    )
