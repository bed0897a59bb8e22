"""Averaging with neighbours, and asynchronous updates: `strategy.name: gossip` and `async_sgd`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from scaleray.config.base import Count, Settings


class GossipSettings(Settings):
    """Whom workers average with, and how far they may drift apart."""

    graph: Literal["ring", "exponential", "matching"] = "exponential"
    """gossip: the workers that a worker averages with. ring: both neighbours; exponential: one at distance 1, 2, 4, ...
    in turn; matching: random pairs, new each step."""
    is_asynchronous: bool = False
    """gossip: send parameters to neighbours and continue; theirs are mixed in when they arrive."""
    max_staleness: Annotated[int, Field(ge=0, le=1000)] = 4
    """async_sgd, asynchronous gossip: steps by which a worker may be ahead of the slowest (gossip: of those it hears
    from) before it waits. Each takes the memory of the trained parameters twice."""
    meet_every: Count = 50
    """Steps between two meetings of all workers, where losses are summed and decisions are made. Evaluations and
    checkpoints are meetings too."""
