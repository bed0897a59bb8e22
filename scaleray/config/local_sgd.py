"""Replicas that train apart and average now and then: `strategy.name: local_sgd` and `diloco`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from scaleray.config.base import Count, Positive, Probability, Settings


class LocalSgdSettings(Settings):
    """How often replicas meet, and what they do then."""

    sync_every: Count = 16
    """Optimizer steps between two averagings over all workers. 1 averages after every step. Between them the recorded
    loss is that of rank 0's own samples, and gradients, their norm and clipping are each worker's own."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Number of ordinary steps, with gradients averaged in each, before replicas go apart."""
    node_sync_every: Count | None = None
    """Hierarchical: steps between two averagings within a node; must divide `sync_every`. None: nodes do nothing of
    their own."""
    node_size: Count | None = None
    """Hierarchical: number of consecutive ranks that make a node (or a rack, or whatever is well connected). None: the
    ranks that run on one machine."""
    average_momentum: bool = True
    """local_sgd: average the optimizer's state together with the parameters."""
    outer_learning_rate: Positive = 0.7
    """diloco: step of the outer Nesterov optimizer on the mean change of the replicas."""
    outer_momentum: Probability = 0.9
    """diloco: momentum of the outer Nesterov optimizer."""

    @model_validator(mode="after")
    def _nodes_meet_more_often(self) -> LocalSgdSettings:
        often = self.node_sync_every
        if often is not None and (often >= self.sync_every or self.sync_every % often):
            raise ValueError(
                f"local_sgd.node_sync_every: it is {often}, and must be a smaller divisor of "
                f"sync_every, {self.sync_every}"
            )
        if self.node_size is not None and often is None:
            raise ValueError("local_sgd.node_size: it says what node_sync_every means, which is not given")
        return self
