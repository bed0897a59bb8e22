"""Replicas that train apart and average now and then: `strategy.name: local_sgd` and `diloco`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from scaleray.config.base import Count, Positive, Probability, Settings


class LocalSgdSettings(Settings):
    """How often replicas meet, and what they do then."""

    sync_every: Count = 16
    """Optimizer steps between two averagings over all workers. 1 averages after every step."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Ordinary steps, with gradients averaged in each, before replicas go apart."""
    node_sync_every: Count | None = None
    """Hierarchical: steps between two averagings within a node; must divide `sync_every`. None: nodes do nothing of their own."""
    average_momentum: bool = True
    """local_sgd: average the optimizer's state together with the parameters."""
    outer_learning_rate: Positive = 0.7
    """diloco: step of the outer Nesterov optimizer on the mean change of the replicas."""
    outer_momentum: Probability = 0.9
    """diloco: its momentum."""
