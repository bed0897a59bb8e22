"""What a strategy gives to the training loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Parallel:
    """A model spread over workers, and the few things the loop calls."""

    model: nn.Module
    """What the forward pass calls."""
    module: nn.Module
    """The user's own model inside, for evaluation and for its state."""
    gradient_divisor: int = 1
    """By how much the strategy divides summed gradients: the world size where it averages, 1 where it sums."""
    no_sync: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """Context of a micro-batch that is not the last of its step: gradients stay local."""
    before_evaluation: Callable[[], None] = lambda: None
    """Make buffers equal on all ranks. Collective."""
    full_state_dict: Callable[[], dict[str, Any]] = dict
    """Unsharded weights on the CPU, on rank 0; empty elsewhere. Collective."""
    close: Callable[[], None] = lambda: None
    """Take every hook off the user's model."""


def cpu_state_dict(module: nn.Module) -> dict[str, Any]:
    """The module's parameters and buffers, copied to the CPU; extra state, which is no tensor, as it is."""
    return {
        name: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
        for name, value in module.state_dict().items()
    }
