"""Averaging with neighbours, and asynchronous updates: `strategy.name: gossip` and `async_sgd`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from scaleray.config.base import Count, Settings


class GossipSettings(Settings):
    """With whom workers average, and how far they may drift apart."""

    graph: Literal["ring", "exponential", "matching"] = "exponential"
    """ring: both neighbours; exponential: one at distance 1, 2, 4, ... in turn; matching: random pairs, new each step."""
    is_asynchronous: bool = False
    """Average with the neighbour's newest parameters without waiting for it."""
    max_staleness: Annotated[int, Field(ge=0)] = 4
    """async_sgd: steps by which a worker may be ahead of the slowest before it waits."""
    meet_every: Count = 50
    """Steps between two meetings of all workers, where losses are summed and decisions are made. Evaluations and
    checkpoints are meetings too."""
